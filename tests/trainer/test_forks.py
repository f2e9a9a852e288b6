"""Conversations with a rewritten history: every trajectory is trained on, and counted as part of one conversation."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.agents.trajectory import Trajectory
from lockstep.algorithms.advantages import AdvantageEstimator
from lockstep.algorithms.compute_advantage import compute_advantage
from lockstep.algorithms.kl import FixedKLController, apply_kl_penalty
from lockstep.algorithms.rollout_correction import apply_rollout_correction
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion
from lockstep.single_controller import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.mini_batches import MiniBatches, lay_out
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.rollout_batch import trajectory_tensors
from lockstep.workers.updates import mini_batches
from tests.tiny import save_tiny_model, write_rows

PROMPT, RESPONSE, PAD = 6, 12, 0
KEYS = ("values", "old_log_probs", "ref_log_prob", "rollout_log_probs", "entropys", "sum_pi_squared", "rm_scores")


CONFIG = RolloutConfig(
    seed=0,
    prompt_length=PROMPT,
    response_length=RESPONSE,
    log_prob_use_dynamic_bsz=False,
    log_prob_max_token_len_per_gpu=1000,
)


def trajectory(*parts: tuple[str, int], generator: torch.Generator, version: int = 0) -> Trajectory:
    """Random tokens. parts: sampled or context, and how many."""

    def draw(count: int) -> list[int]:
        return torch.randint(3, 259, (count,), generator=generator).tolist()

    made = Trajectory(draw(1 + len(parts)))
    for kind, count in parts:
        if kind == "sampled":
            made.add_sampled(Completion(draw(count), [-1.0] * count, "stop", [version] * count))
        else:
            made.add_context(draw(count))
    return made


def samples(lists: list[list[Trajectory]], scores: list[float], uids: str) -> DataProto:
    """Scored conversations, as a rollout returns them."""
    last = [of_one[-1] for of_one in lists]
    tensors = trajectory_tensors(last, CONFIG, PAD)
    reward = torch.zeros(len(last), RESPONSE)
    for row, score in enumerate(scores):
        reward[row, max(0, len(last[row].response_ids) - 1)] = score
    columns = {
        "uid": object_array(uids),
        forks.EARLIER: object_array([[asdict(t) for t in of_one[:-1]] for of_one in lists]),
    }
    return DataProto.from_dict(tensors=tensors | {"token_level_scores": reward}, non_tensors=columns)


def forked() -> list[list[Trajectory]]:
    """Six conversations: with 1, 3, 1, 2, 1 and 1 trajectories; the last one is empty."""
    g = torch.Generator().manual_seed(0)
    one = [trajectory(("sampled", 3), ("context", 2), ("sampled", 4), generator=g)]
    three = [trajectory(("sampled", n), generator=g, version=n) for n in (2, 4)]
    three.append(trajectory(("context", 3), ("sampled", 5), ("context", 1), ("sampled", 1), generator=g))
    two = [
        trajectory(("sampled", 5), ("context", 1), ("sampled", 2), generator=g),
        trajectory(("sampled", 1), generator=g),
    ]
    return [
        one,
        three,
        [trajectory(("sampled", 7), generator=g)],
        two,
        [trajectory(("sampled", 2), generator=g)],
        [Trajectory([5])],
    ]


def expanded() -> DataProto:
    batch = samples(forked(), [1.0, 0.0, 0.5, 0.25, 2.0, 0.0], "aabbcc")
    return forks.add_rows(batch, CONFIG, PAD)


def test_rows_of_earlier_trajectories() -> None:
    lists = forked()
    batch = expanded()
    assert len(batch) == 9 and forks.num_conversations(batch) == 6
    assert forks.rows_of(batch) == [[0], [6, 7, 1], [2], [8, 3], [4], [5]]
    assert "".join(batch.non_tensor_batch["uid"]) == "aabbccaab" and forks.EARLIER not in batch.non_tensor_batch
    for rows, trajectories in zip(forks.rows_of(batch), lists):
        for row, expected in zip(rows, trajectories):
            length = len(expected.response_ids)
            assert batch.tensors["responses"][row, :length].tolist() == expected.response_ids
            assert batch.tensors["response_mask"][row, :length].tolist() == expected.response_mask
            assert batch.tensors["policy_versions"][row, :length].tolist() == expected.policy_versions
    assert not batch.tensors["token_level_scores"][6:].any()
    last = forks.conversations(batch)
    assert len(last) == 6 and forks.OWNER not in last.tensors
    assert last.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.5, 0.25, 2.0, 0.0]


def test_a_saved_batch_keeps_earlier_trajectories(tmp_path: Path) -> None:
    batch = samples(forked(), [1.0, 0.0, 0.5, 0.25, 2.0, 0.0], "aabbcc")
    batch.save_to_disk(tmp_path / "batch")
    loaded = forks.add_rows(DataProto.load_from_disk(tmp_path / "batch"), CONFIG, PAD)
    expected = forks.add_rows(batch, CONFIG, PAD)
    assert all(torch.equal(loaded.tensors[name], expected.tensors[name]) for name in expected.tensors.keys())  # noqa: SIM118


def test_without_forks_the_batch_is_the_same() -> None:
    batch = samples([of_one[-1:] for of_one in forked()], [0.0] * 6, "aabbcc")
    tensors = dict(batch.tensors.items())
    same = forks.add_rows(batch, CONFIG, PAD)
    assert same is batch is forks.joined(batch) is forks.conversations(batch) is forks.split(batch, batch)
    assert dict(batch.tensors.items()) == tensors and forks.EARLIER not in batch.non_tensor_batch
    assert forks.choose(batch, [3, 1]).tensors["responses"].equal(batch.tensors["responses"][[3, 1]])


def test_chosen_conversations_keep_all_their_rows() -> None:
    batch = expanded()
    chosen = forks.choose(batch, [3, 1, 1, 4])
    assert chosen.tensors[forks.OWNER].tolist() == [0, 1, 2, 3, 0, 1, 1, 2, 2]
    assert torch.equal(chosen.tensors["responses"], batch.tensors["responses"][[3, 1, 1, 4, 8, 6, 7, 6, 7]])


def whole_and_cut() -> tuple[DataProto, DataProto]:
    """Conversations as one row each, and the same with some of them cut into several trajectories."""
    g = torch.Generator().manual_seed(1)
    whole = [
        trajectory(("sampled", 3), ("context", 2), ("sampled", 4), ("context", 1), ("sampled", 2), generator=g),
        trajectory(("sampled", 5), ("context", 2), ("sampled", 3), generator=g),
        trajectory(("sampled", 12), generator=g),
        trajectory(("sampled", 2), ("context", 3), ("sampled", 6), generator=g),
    ]
    cuts: list[list[int]] = [[3, 9], [], [4], [5]]
    one_row = samples([[t] for t in whole], [1.0, 0.0, 0.5, 0.25], "aabb")
    one_row = forks.add_rows(one_row, CONFIG, PAD)
    values = {name: torch.randn(4, RESPONSE, generator=g) - 2 for name in KEYS}
    values["entropys"], values["sum_pi_squared"] = values["entropys"].abs(), values["sum_pi_squared"].abs()
    one_row.tensors.update(values | {"reward_baselines": torch.tensor([0.1, 0.1, 0.2, 0.2])})
    pieces, places = [], []
    for row, (t, at) in enumerate(zip(whole, cuts)):
        spans = list(zip([0, *at], [*at, len(t.response_ids)]))
        fields = ("response_ids", "response_mask", "log_probs", "policy_versions")
        pieces.append([Trajectory(t.prompt_ids, *(getattr(t, name)[a:b] for name in fields)) for a, b in spans])
        places.append([(row, a, b) for a, b in spans])
    batch = samples(pieces, [1.0, 0.0, 0.5, 0.25], "aabb")
    batch.tensors["reward_baselines"] = torch.tensor([0.1, 0.1, 0.2, 0.2])
    batch = forks.add_rows(batch, CONFIG, PAD)
    order = [of_one[-1] for of_one in places] + [place for of_one in places for place in of_one[:-1]]
    for name in KEYS:
        rows = torch.zeros(len(order), RESPONSE)
        for number, (row, a, b) in enumerate(order):
            rows[number, : b - a] = values[name][row, a:b]
        batch.tensors[name] = rows
    return one_row, batch


def tokens_of(batch: DataProto, name: str) -> list[list[float]]:
    """Of each conversation, in the order of sampling."""
    found = []
    for rows in forks.rows_of(batch):
        parts = [batch.tensors[name][row][batch.tensors["response_mask"][row].bool()] for row in rows]
        found.append(torch.cat(parts).tolist())
    return found


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
def test_advantages_are_those_of_the_conversation_as_one_row(estimator: str) -> None:
    """Every built-in estimator, with the KL in the reward and importance weights per sequence."""
    results = []
    for batch in whole_and_cut():
        rows, _ = apply_kl_penalty(forks.joined(batch), FixedKLController(0.1))
        correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0)
        rows, metrics = apply_rollout_correction(rows, correction)
        config = AlgoConfig(adv_estimator=estimator, gamma=0.9, lam=0.8)
        rows = compute_advantage(rows, estimator, gamma=0.9, lam=0.8, config=config)
        batch = forks.split(batch, rows)
        results.append(([tokens_of(batch, name) for name in forks.COMPUTED], metrics))
    (expected, expected_metrics), (found, found_metrics) = results
    assert found_metrics == pytest.approx(expected_metrics, rel=1e-5)
    for name, one, other in zip(forks.COMPUTED, expected, found):
        assert [len(row) for row in other] == [len(row) for row in one]
        for a, b in zip(one, other):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-6), name
    assert any(value != 0 for row in found[3] for value in row)


def test_the_score_of_an_empty_response_counts_in_its_group() -> None:
    """Such as that of a program that made no request; its score is at the first place, which has no token."""
    batch = forks.add_rows(samples(forked(), [1.0, 0.0, 0.5, 0.25, 2.0, -1.0], "aabbcc"), CONFIG, PAD)
    rows = forks.joined(batch)
    assert rows.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.5, 0.25, 2.0, -1.0]
    assert not rows.tensors["attention_mask"][5, PROMPT:].any() and not rows.tensors["response_mask"][5].any()
    rows.tensors["token_level_rewards"] = rows.tensors["token_level_scores"]
    rows = compute_advantage(rows, "grpo", norm_adv_by_std_in_grpo=False)
    assert tokens_of(forks.split(batch, rows), "advantages")[4] == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("rule", [MiniBatches(2), MiniBatches(4, epochs=2, seed=3), MiniBatches(100)])
def test_a_mini_batch_has_all_rows_of_its_conversations(rule: MiniBatches) -> None:
    batch = expanded()
    batch.tensors["row"] = torch.arange(len(batch))
    rows_of = forks.rows_of(batch)
    num_tokens = batch.tensors["response_mask"].sum(-1)
    for dp_size in (1, 2, 3, 5):
        laid_out = lay_out(batch, rule, dp_size, balance=True)
        assert forks.OWNER not in laid_out.tensors
        ranks = [list(mini_batches(part)) for part in laid_out.chunk(dp_size)]
        for chosen, parts in zip(rule.split(6), zip(*ranks, strict=True), strict=True):
            expected = [row for conversation in chosen for row in rows_of[conversation]]
            found = [row for rows, _ in parts for row in rows["row"][rows["response_mask"].any(-1)].tolist()]
            assert Counter(found) == Counter(row for row in expected if num_tokens[row])
            (info,) = {json.dumps(info) for _, info in parts}
            counts = json.loads(info)
            assert counts["batch_num_tokens"] == int(num_tokens[expected].sum())
            assert counts["global_batch_size"] == len(found)


def naive_gradients(
    folder: Path, lists: list[list[Trajectory]], advantages: list[float], mode: str
) -> dict[str, Tensor]:
    """A loop over the trajectories, without padding; the policy is the one that sampled, so all ratios are 1."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    sampled = [(t, a) for of_one, a in zip(lists, advantages) for t in of_one if any(t.response_mask)]
    num_tokens = sum(sum(t.response_mask) for t, _ in sampled)
    for t, advantage in sampled:
        log_probs = model(torch.tensor([t.ids])).logits[0, :-1].log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(t.ids[1:])[:, None])[len(t.prompt_ids) - 1 :, 0]
        total = -(advantage * own * torch.tensor(t.response_mask)).sum()
        of_sequences = sum(t.response_mask) * len(sampled)
        (total / (num_tokens if mode == "token-mean" else of_sequences)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


ACTOR = "actor_rollout_ref.actor"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    "mode, split",
    [
        ("token-mean", [f"{MICRO}=1"]),
        ("token-mean", [f"{MICRO}=null", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=40"]),
        ("seq-mean-token-mean", [f"{MICRO}=4"]),
    ],
    ids=["one-row", "by-tokens", "sequences"],
)
def test_the_gradient_is_that_of_a_loop_over_the_trajectories(
    mode: str, split: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    write_rows(tmp_path / "train.parquet")
    paths = [f"actor_rollout_ref.model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.parquet"]
    lengths = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}", "trainer.device=cpu"]
    lists, advantages = forked(), [1.0, -1.0, 0.5, -0.25, 2.0, 3.0]
    expected = naive_gradients(tmp_path / "model", lists, advantages, mode)
    batch = expanded()
    owner = batch.tensors[forks.OWNER]
    batch.tensors["advantages"] = torch.tensor(advantages)[owner][:, None] * batch.tensors["response_mask"]
    settings = [*paths, *lengths, *split, f"{ACTOR}.loss_agg_mode={mode}"]
    config = load_config(PPOConfig, settings).actor_rollout_ref
    init = ClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor_rollout", device="cpu")
    group: Any = LocalWorkerGroup(ResourcePool([1]), init)
    group.init_model()
    engine = group.workers[0].actor
    found: dict[str, Tensor] = {}

    def keep() -> float:
        named = engine.model.named_parameters()
        found.update({n.removeprefix("model."): p.grad.clone() for n, p in named if p.grad is not None})
        return 0.0

    monkeypatch.setattr(engine, "optimizer_step", keep)
    monkeypatch.setattr(engine, "schedule_step", lambda: None)
    laid_out = lay_out(batch, MiniBatches(6), 1, balance=False)
    laid_out.meta_info["rollout_gap"] = "none"
    laid_out.meta_info["audit"] = dict.fromkeys(("gradient", "optimizer_steps"), "off")  # `keep` takes no step
    group.update_actor(laid_out).get()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-4), name


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if m['role'] == 'user' or loop.last or m['content'] | length > 9 else '-' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = """
from lockstep.agents.loops import AgentLoop

class ThreeTurns(AgentLoop):
    '''Turns of a few tokens: one token in three ends a turn. Rows with an odd number have one turn.'''

    async def run(self, conversation):
        ends = range(0, 259, 3)
        turn = await conversation.generate(ends)
        for _ in range(2 * (conversation.row["index"] % 2)):
            if not turn.ended or not conversation.add([{"role": "user", "content": "again"}]):
                return
            turn = await conversation.generate(ends)
"""
ROLLOUT = "actor_rollout_ref.rollout"
ONE_STEP = "trainer.total_training_steps=1"


@pytest.fixture
def arguments(overrides: list[str], tmp_path: Path) -> list[str]:
    """A run whose chat template drops earlier answers, if they are short."""
    (tmp_path / "loop.py").write_text(LOOP)
    return [
        *overrides,
        f'actor_rollout_ref.model.custom_chat_template="{TEMPLATE}"',
        f"{ROLLOUT}.multi_turn.use_inference_chat_template=true",
        f"{ROLLOUT}.agent.default_agent_loop={tmp_path}/loop.py:ThreeTurns",
        f"{ROLLOUT}.n=2",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=30",
        "data.max_response_length=100",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
    ]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[DataProto]:
    """The batches that steps train on."""
    found: list[DataProto] = []
    train_step = PPOTrainer._train_step

    def recorded(self: PPOTrainer, *args: Any) -> tuple[DataProto, dict[str, Any]]:
        batch, metrics = train_step(self, *args)
        found.append(batch)
        return batch, metrics

    monkeypatch.setattr(PPOTrainer, "_train_step", recorded)
    return found


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_file(run / "global_step_2" / "actor" / "huggingface" / "model.safetensors")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/pg_loss" in row]


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.slow
def test_a_run_trains_on_every_turn_in_every_mode(
    arguments: list[str], tmp_path: Path, batches: list[DataProto]
) -> None:
    dumped = [f"trainer.rollout_data_dir={tmp_path}/rollouts", "trainer.test_freq=1"]
    assert main([*arguments, *dumped]) == 0
    steps = metrics_of(tmp_path / "run")
    assert len(batches) == len(steps) == 2
    for number, (batch, step) in enumerate(zip(batches, steps), 1):
        mask = batch.tensors["response_mask"].bool()
        num_breaks = step["trajectory_breaks/mean"] * 8
        assert forks.num_conversations(batch) == 8 and len(batch) == 8 + num_breaks > 8
        # every row was sampled as it is trained on
        gap = (batch.tensors["old_log_probs"] - batch.tensors["rollout_log_probs"]).abs()
        assert mask.any(-1).all() and gap[mask].max() < 1e-4
        assert torch.equal(batch.tensors["policy_versions"] >= 0, mask)
        advantages = batch.tensors["advantages"]
        for rows in forks.rows_of(batch):
            assert len({round(float(value), 5) for row in rows for value in advantages[row][mask[row]]}) == 1
            assert len({batch.non_tensor_batch["uid"][row] for row in rows}) == 1
        assert step["training/rollout_probs_diff_max"] < 1e-4 and step["actor/grad_norm"] > 0
        assert any(name.startswith("val-core/") for name in step)
        # what counts samples counts conversations
        last = forks.conversations(batch)
        scores = last.tensors["token_level_scores"].sum(-1)
        assert step["critic/score/mean"] == pytest.approx(float(scores.mean()))
        lengths = last.tensors["attention_mask"][:, 30:].sum(-1).float()
        assert step["response_length/mean"] == pytest.approx(float(lengths.mean()))
        assert step["perf/total_num_tokens"] == int(batch.tensors["attention_mask"].sum())
        assert len((tmp_path / "rollouts" / f"{number}.jsonl").read_text().splitlines()) == 8
    expected = weights_of(tmp_path / "run")
    split = ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"]
    fully_async = ["trainer.async_mode=fully_async", "trainer.max_staleness=0", *split]
    for name, settings in {"sync": [f"{ROLLOUT}.mode=sync", f"{MICRO}=1"], "fully_async": fully_async}.items():
        assert main([*arguments, *settings, f"trainer.default_local_dir={tmp_path}/{name}"]) == 0
        for key, weights in weights_of(tmp_path / name).items():
            assert float((weights - expected[key]).abs().max()) <= (3e-5 if name == "sync" else 0.0), (name, key)


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "algorithm.use_kl_in_reward=true", ONE_STEP],
        ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min", ONE_STEP],
        ["trainer.async_mode=colocated", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"],
    ],
    ids=["critic", "pf-ppo", "stale"],
)
def test_other_settings_train_on_forks(settings: list[str], arguments: list[str], batches: list[DataProto]) -> None:
    assert main([*arguments, *settings, "trainer.save_freq=0", f"{ACTOR}.ppo_mini_batch_size=4"]) == 0
    for batch in batches:
        rows = forks.rows_of(batch)
        assert max(map(len, rows)) == 3
        mask = batch.tensors["response_mask"].bool()
        assert all(torch.isfinite(batch.tensors[name][mask]).all() for name in ("advantages", "returns"))
        assert batch.tensors["advantages"][len(rows) :][mask[len(rows) :]].any()
