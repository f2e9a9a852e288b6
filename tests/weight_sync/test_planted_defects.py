"""Weight updates of every engine that holds a copy: each planted defect stops the run with its cause.

`make test-vllm` runs the cases of vLLM in the actor's process and of a real vLLM server.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.server import protocols
from lockstep.engines.rollout.vllm_worker import WeightUpdates
from lockstep.utils.audit import AuditError
from lockstep.utils.fingerprint import fingerprint
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import save_tiny_model, write_rows
from tests.vllm_server import vllm_server
from tests.weight_sync.copies import Copy
from tests.weight_sync.planted_worker import METHODS, PLANTED

VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]
ROLLOUT = "actor_rollout_ref.rollout"
CLOSE = 1e-4


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("embedded", True), id="embedded"),
        pytest.param(("hf", True), id="hf"),
        pytest.param(("vllm", True), id="vllm", marks=VLLM),
        pytest.param(("vllm", False), id="vllm-untied", marks=VLLM),
        pytest.param(("server", True), id="server", marks=VLLM),
    ],
)
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """The model has one head, of a size that vLLM's CPU kernels know."""
    folder: Path = tmp_path_factory.mktemp("copy")
    name, is_tied = request.param
    save_tiny_model(folder / "model", num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=is_tied)
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={write_rows(folder / 'train.parquet')}",
        f"{ROLLOUT}.name={name}",
        f"{ROLLOUT}.max_num_seqs=8",
        f"{ROLLOUT}.temperature=0.7",
        "data.max_prompt_length=160",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if name == "vllm":
            for method, value in METHODS.items():
                patch.setattr(WeightUpdates, method, value, raising=False)
        if name == "server":
            patch.setattr(protocols, "EXTENSION", PLANTED)
            url = stack.enter_context(vllm_server(folder / "model", folder / "vllm.log", PLANTED))
            overrides.append(f"{ROLLOUT}.server.urls=[{url}]")
        config = load_config(PPOConfig, overrides).actor_rollout_ref
        # embedded and hf would share the actor's tensors in its process
        roles = ["actor", "rollout"] if name in ("embedded", "hf") else ["actor_rollout"]
        workers = [ActorRolloutRefWorker(config, role, "cpu") for role in roles]
        for worker in workers:
            worker.init_model()
        made = Copy(workers[0], workers[-1])
        made.update()  # until then a copy may have random weights
        yield made


def in_vllm(copy: Copy) -> bool:
    return copy.engine.config.name in ("vllm", "server")


def plant_in_vllm(copy: Copy, defect: str) -> None:
    """Let the workers of vLLM do something wrong, see planted_worker.py."""
    engine: Any = copy.engine
    if engine.config.name == "vllm":
        engine._on_worker("lockstep_plant", defect)
    else:
        (server,) = engine._pool.servers
        engine._loop.run(server.protocol._on_workers(server, "lockstep_plant", defect))


def test_updates_reach_the_copy(copy: Copy) -> None:
    for _ in range(3):
        copy.train()
        assert copy.update() < CLOSE
        assert copy.engine.policy_version == copy.version
    assert not (copy.rollout.is_actor and copy.engine.info.shares_weights) and not hasattr(copy.rollout, "generator")
    sent = {name: fingerprint(tensor) for name, tensor in copy.actor.actor.weights()}
    assert copy.engine.fingerprints(list(sent)) == sent
    request = GenerationRequest([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert copy.engine.generate([request])[0].policy_version == copy.version


def test_skipped_update(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    what = r"was not received" if in_vllm(copy) else r"differs \((\d+) of \1 tensors\)"
    with monkeypatch.context() as planted:
        planted.setattr(copy.engine, "update_weights", list)
        copy.train()
        with pytest.raises(AuditError, match=rf"on rank 0, model\.embed_tokens\.weight {what}"):
            copy.update()
    assert copy.update() < CLOSE


@pytest.mark.parametrize("dropped", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_dropped_tensor(copy: Copy, dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update, what = copy.engine.update_weights, "was not received" if in_vllm(copy) else "differs"
    with monkeypatch.context() as planted:
        planted.setattr(copy.engine, "update_weights", lambda ws: update(w for w in ws if w[0] != dropped))
        copy.train()
        with pytest.raises(AuditError, match=rf"{dropped} {what} \(1 of \d+ tensors\)"):
            copy.update()
    assert copy.update() < CLOSE


def test_tensor_that_arrived_but_was_not_loaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        if in_vllm(copy):
            plant_in_vllm(copy, "changed norm")
        else:
            update = copy.engine.update_weights

            def with_another_norm(weights: Iterator[Any]) -> None:
                update((name, tensor + 1e-6 if name == "model.norm.weight" else tensor) for name, tensor in weights)

            planted.setattr(copy.engine, "update_weights", with_another_norm)
        copy.train()
        with pytest.raises(AuditError, match=r"model\.norm\.weight differs \(1 of \d+ tensors\)"):
            copy.update()
        if in_vllm(copy):
            plant_in_vllm(copy, "")
    assert copy.update() < CLOSE


def test_head_left_tied_to_the_old_embedding(copy: Copy) -> None:
    if not copy.actor.actor.model.hf_config.tie_word_embeddings:
        pytest.skip("the head is not tied")
    computes = r"canary text differ .* the tensors that arrived are not those it computes with"
    if in_vllm(copy):
        plant_in_vllm(copy, "old head")
        copy.train()
        with pytest.raises(AuditError, match=r"lm_head\.weight is .* model\.embed_tokens\.weight, to which it is tied"):
            copy.update()
        plant_in_vllm(copy, "old head unnoticed")
        with pytest.raises(AuditError, match=computes):
            copy.update()
        plant_in_vllm(copy, "")
    else:
        module: Any = copy.engine.module  # type: ignore[attr-defined]
        tied, module.lm_head.weight = module.lm_head.weight, nn.Parameter(module.lm_head.weight.detach().clone())
        copy.train()
        with pytest.raises(AuditError, match=computes):
            copy.update()
        module.lm_head.weight = tied
    assert copy.update() < CLOSE


def test_stale_prefix_cache(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = copy.engine
    stale = "its prefix cache holds keys and values of earlier weights"
    if not in_vllm(copy):  # they keep nothing between two requests, so the cache is planted too
        cache: dict[int, Any] = {}
        generate = engine.generate
        with monkeypatch.context() as planted:
            planted.setattr(engine, "generate", lambda requests: cache.setdefault(0, generate(requests)))
            planted.setattr(engine, "drop_cached_prefixes", cache.clear)
            assert copy.update() < CLOSE
            copy.train()
            with pytest.raises(AuditError, match=stale):
                copy.update()
        assert copy.update() < CLOSE
        return

    plant = without_resets_in_process if engine.config.name == "vllm" else without_resets_of_the_server
    with monkeypatch.context() as planted:
        planted.setattr(engine, "_salt", lambda: "always the same")
        assert copy.update() < CLOSE, "a reset alone is enough"
        plant(engine, planted)
        copy.train()
        with pytest.raises(AuditError, match=stale):
            copy.update()
    with monkeypatch.context() as planted:
        plant(engine, planted)
        copy.train()
        assert copy.update() < CLOSE, "a salt alone is enough"
    assert copy.update() < CLOSE


def without_resets_in_process(engine: Any, planted: pytest.MonkeyPatch) -> None:
    finish = engine.finish_update

    def finish_without_reset(version: int) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(engine, "drop_cached_prefixes", lambda: None)
            finish(version)

    planted.setattr(engine, "finish_update", finish_without_reset)


def without_resets_of_the_server(engine: Any, planted: pytest.MonkeyPatch) -> None:
    """vLLM's /pause resets the cache too, unless it is told not to."""
    (server,) = engine._pool.servers
    post, finish, is_update = server.post, engine.finish_update, False

    async def post_without_reset(path: str, body: Any = None) -> Any:
        if path == "/pause?mode=abort":
            path += "&clear_cache=false"
        return {"success": True} if is_update and path == "/reset_prefix_cache" else await post(path, body)

    def finish_without_reset(version: int) -> None:
        nonlocal is_update
        is_update = True
        finish(version)
        is_update = False

    planted.setattr(server, "post", post_without_reset)
    planted.setattr(engine, "finish_update", finish_without_reset)
