"""The protocol of Hugging Face's text-generation-inference: /generate, with text in and tokens and log-probs out.

prompt ids ─► text ─► POST /generate ─► details.tokens: ids and log-probs
                                    └─► details.prefill, or POST /tokenize: the prompt's ids, which must be ours

TGI adds the tokenizer's special tokens to every text and shows `prefill` only if it was started with --enable-prefill-logprobs
(before 3.0 always). Log-probs are of the distribution that was sampled from: after temperature, top_k and top_p. A response ends at
the end-of-sequence tokens of the served model alone; at other stop tokens of a request the client cuts it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lockstep.engines.rollout.server.http import Connection
from lockstep.engines.rollout.server.prompt_text import PromptText, check_same_tokens
from lockstep.engines.rollout.server.protocols import PROTOCOLS, Answer, ServedModel, ServerProtocol
from lockstep.protocol.generation import GenerationRequest

FINISH = {"eos_token": "stop", "stop_sequence": "stop"}
"""TGI's reasons to ours, if they differ."""
WORD = "a"
"""Text of the shortest prompt: one token of most tokenizers, besides those that they add."""


@PROTOCOLS.register("tgi")
class TgiProtocol(ServerProtocol):
    generate_path = "/generate"
    health_path = "/health"
    marker = "/generate_stream"
    takes_stop_tokens = False
    ignores_eos = False
    takes_images = False

    @cached_property
    def _prompts(self) -> PromptText:
        return PromptText(self.open_tokenizer())

    @cached_property
    def _tokenized(self) -> dict[str, list[int]]:
        """Text to the tokens that /tokenize answered. A server that is reloaded gets a new protocol object."""
        return {}

    async def models(self, server: Connection) -> list[ServedModel]:
        info = await server.get("/info")
        longest_prompt = info.get("max_input_tokens", info.get("max_input_length"))  # its name before 2.0
        return [
            ServedModel(info["model_id"], info["max_total_tokens"], longest_prompt, info["max_concurrent_requests"])
        ]

    def body(
        self, request: GenerationRequest, request_id: str, model: str, stops: Sequence[int], salt: str
    ) -> dict[str, Any]:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "do_sample": not sampling.greedy,
            "seed": request.stream_seed,
            "details": True,
            "decoder_input_details": True,
            "return_full_text": False,
        }
        if not sampling.greedy:  # each of these makes TGI sample
            parameters["temperature"] = sampling.temperature
            parameters |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
            parameters |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        return {"inputs": self._prompts.text_of(request.prompt_ids), "parameters": parameters}

    def answer(self, body: Any) -> Answer:
        details = body["details"]
        tokens = details["tokens"]
        reason = details["finish_reason"]
        prompt_ids = [token["id"] for token in details["prefill"]] or None
        return Answer(
            [token["id"] for token in tokens],
            [token["logprob"] for token in tokens],
            FINISH.get(reason, reason),
            prompt_ids=prompt_ids,
        )

    async def check_prompt(self, server: Connection, request: GenerationRequest, answer: Answer) -> None:
        text = self._prompts.text_of(request.prompt_ids)
        found = answer.prompt_ids if answer.prompt_ids is not None else await self._tokens_of(server, text)
        check_same_tokens(found, request.prompt_ids, text, server.url)

    async def _tokens_of(self, server: Connection, text: str) -> list[int]:
        """The server's tokens of a text; asked once."""
        if text not in self._tokenized:
            tokens = await server.post("/tokenize", {"inputs": text})
            self._tokenized[text] = [token["id"] for token in tokens]
        return self._tokenized[text]

    def probe_prompt(self, token_id: int) -> list[int]:
        return self._prompts.prompt_like(self._prompts.tokens_of(WORD))

    def prompt_like(self, token_ids: list[int]) -> list[int]:
        return self._prompts.prompt_like(token_ids)
