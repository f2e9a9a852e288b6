"""The reward model: one score per sequence, at its last response token."""

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from lockstep.agents.renderer import Renderer
from lockstep.config.reward import RewardModelConfig
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol import DataProto
from lockstep.protocol.images import IMAGES
from lockstep.protocol.require import require
from lockstep.protocol.tokens import read, with_images
from lockstep.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from lockstep.workers.model_worker import ModelWorker
from lockstep.workers.reward_text import token_ids
from lockstep.workers.updates import micro_batching


class RewardModelWorker(ModelWorker):
    key = "reward_model.model"
    kind = "reward"
    mesh = "reward"
    config: RewardModelConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        model = self.config.model
        self.policy_tokenizer = None
        if model.input_tokenizer:
            self.policy_tokenizer = hf_tokenizer(model.input_tokenizer, key=f"{self.key}.input_tokenizer")
        self._start(model.custom_chat_template)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_tokenizer(self, vocabulary: dict[str, int]) -> None:
        """ValueError if the policy's tokens have other ids here, and responses are not encoded again."""
        if self.policy_tokenizer is not None:
            return
        own = self.tokenizer.get_vocab()
        if other := next((token for token, number in vocabulary.items() if own.get(token) != number), None):
            raise ValueError(
                f"{self.key}.path={self.config.model.path}: its tokenizer is not the policy's (the token {other!r} is "
                f"{vocabulary[other]} there and {own.get(other, 'none')} here); set {self.key}.input_tokenizer to that of the "
                "policy"
            )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward"), blocking=False)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        require(data, "input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        config = self.config
        micro = micro_batching(
            "reward model",
            config.micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.forward_max_token_len_per_gpu,
        )
        rows = with_images(data) if self.policy_tokenizer is None else self._reencode(data, self.policy_tokenizer)
        self.engine.onload()
        score = self.engine.forward(rows, micro, at_end=True)["score"]
        self.engine.offload()
        mask = read(data.tensors, "response_mask")
        place = torch.arange(mask.shape[1])
        last = (mask * place).amax(-1, keepdim=True)
        rm_scores = torch.where((place == last) & mask.any(-1, keepdim=True), score[:, None], 0.0)
        return data.outputs({"rm_scores": rm_scores})

    def _reencode(self, data: DataProto, policy_tokenizer: PreTrainedTokenizerBase) -> TensorDict:
        """The conversation in the reward model's tokens and chat template, if its tokenizer is not the policy's."""
        require(data, "raw_prompt")
        columns, has_turns = data.non_tensor_batch, "__num_turns__" in data.non_tensor_batch
        if any(images is not None for images in columns.get(IMAGES, ())):
            raise ValueError(
                f"{self.key}.input_tokenizer: rows with images cannot be rendered for a reward model with another tokenizer; give "
                "one with the policy's tokenizer, which reads images"
            )
        sequences, plain = [], Renderer(self.tokenizer, ()).as_plain_text
        for row, (response, mask) in enumerate(
            zip(*(read(data.tensors, name) for name in ("responses", "response_mask")))
        ):
            if has_turns:  # of an agent: tool and user messages are part of the response
                turns = list(columns["messages"][row])
            else:
                answer = policy_tokenizer.decode(response[mask.bool()], skip_special_tokens=True)
                turns = [{"role": "assistant", "content": answer}]
            # special tokens of the reward model in their text would fake turns
            turns = [turn | {"content": plain(turn.get("content") or "")} for turn in turns]
            sequences.append(token_ids(self.tokenizer, [*columns["raw_prompt"][row], *turns]))
        width = max(map(len, sequences))
        input_ids = torch.full((len(sequences), width), self.tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for i, ids in enumerate(sequences):
            input_ids[i, : len(ids)] = torch.tensor(ids)
            attention_mask[i, : len(ids)] = 1
        return TensorDict(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp_min(0),
                "responses": input_ids[:, -1:],
                "response_mask": torch.zeros(len(sequences), 1, dtype=torch.int64),
            },
            batch_size=[len(sequences)],
        )
