"""Asynchronous sampling with a scripted rollout: order, overlap with rewards, cuts, failures."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.columns import tensors_of
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.rewards.errors import AllRowsFailedError
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo import async_sampling, group_scorer
from lockstep.trainer.ppo.async_sampling import AsyncSampling
from lockstep.utils.event_loop import all_of

N = 2
SECONDS = 0.05


class ScriptedClient:
    """Answers with the prompt's number after `delay(number)` seconds, and `sample_delay` of the sample's place in its prompt."""

    def __init__(self, delay: Callable[[int], float], sample_delay: Callable[[int], float]) -> None:
        self.delay = delay
        self.sample_delay = sample_delay
        self.submission = threading.Lock()
        self.aborted: set[int] = set()
        self.seeds: dict[int, list[int]] = {}
        self.is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            await asyncio.sleep(0)  # cancelled requests end
            self.is_running = False

    async def resume(self) -> None:
        self.is_running = True

    async def pause(self) -> None:
        self.is_running = False

    async def generate(self, request: GenerationRequest, *, key: str = "") -> Completion:
        assert self.is_running
        (number,) = request.prompt_ids
        seeds = self.seeds.setdefault(number, [])
        seeds.append(request.seed)
        try:
            await asyncio.sleep(self.delay(number) + self.sample_delay((len(seeds) - 1) % N))
        except asyncio.CancelledError:
            self.aborted.add(number)
            raise
        return Completion([number, 2], [-0.5, -0.25], "stop", [0, 0])


def prompts_of(*batches: range) -> Iterator[DataProto]:
    for numbers in batches:
        yield DataProto.from_dict(non_tensors={"raw_prompt_ids": object_array([[number] for number in numbers])})


def numbers_of(data: DataProto) -> list[int]:
    return data.tensors["responses"][:, 0].tolist()


def scores_of(data: DataProto, scores: list[float], **extra: list[Any]) -> dict[str, Any]:
    reward_tensor = torch.zeros(data.tensors["responses"].shape)
    reward_tensor[:, 1] = torch.tensor(scores)
    return {"reward_tensor": reward_tensor, "reward_extra_info": {"reward_failed": [0.0] * len(data), **extra}}


def by_number(data: DataProto, return_dict: bool) -> dict[str, Any]:
    """The second sample of an odd prompt scores more than the first."""
    numbers = numbers_of(data)
    return scores_of(data, [number + (number % 2) * (row % N) for row, number in enumerate(numbers)])


@pytest.fixture
def sampling(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., AsyncSampling]:
    def make(
        *extra: str,
        reward: Any = by_number,
        delay: Callable[[int], float] = lambda number: 0.0,
        sample_delay: Callable[[int], float] = lambda place: 0.0,
    ) -> AsyncSampling:
        settings = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={N}", *extra]
        config = load_config(PPOConfig, [*overrides, *settings])
        monkeypatch.setattr(async_sampling, "RolloutClient", lambda group: ScriptedClient(delay, sample_delay))
        return AsyncSampling(config, None, None, reward, pad_token_id=0)

    return make


def collect(sampling: AsyncSampling, *batches: range) -> tuple[DataProto, dict[str, float], dict[str, float]]:
    timing: dict[str, float] = {}
    batch, metrics = sampling.collect(prompts_of(*batches), step=1, timing=timing)
    return batch, metrics, timing


def test_rows_keep_the_order_of_their_prompts(sampling: Any) -> None:
    batch, metrics, timing = collect(sampling(delay=lambda number: SECONDS * (14 - number)), range(10, 14))
    assert numbers_of(batch) == [10, 10, 11, 11, 12, 12, 13, 13]
    assert batch.tensors["token_level_scores"].sum(-1).tolist() == [10, 10, 11, 12, 12, 12, 13, 14]
    assert len(set(batch.non_tensor_batch["uid"])) == 4 and len(set(batch.tensors["sampling_seed"].tolist())) == 8
    times = [metrics[f"perf/rollout_{name}_s"] for name in ("first_group", "half_groups", "last_group")]
    assert SECONDS <= times[0] < times[1] < times[2] <= timing["gen"] and timing["reward"] < SECONDS


def test_groups_are_scored_while_others_generate(sampling: Any) -> None:
    calls: list[tuple[float, list[int]]] = []

    def slow(data: DataProto, return_dict: bool) -> dict[str, Any]:
        calls.append((time.perf_counter(), numbers_of(data)))
        time.sleep(SECONDS)
        return by_number(data, return_dict)

    made = sampling(reward=slow, delay=lambda number: 6 * SECONDS * (number == 13))
    _, metrics, timing = collect(made, range(10, 14))
    assert [sorted(set(numbers)) for _, numbers in calls] == [[10, 11, 12], [13]]
    assert calls[0][0] + 2 * SECONDS < made.sampler.generated[-1]
    assert timing["reward"] >= SECONDS and timing["gen"] > 3 * SECONDS
    assert 0 < metrics["perf/reward_idle_fraction"] < 1


def test_groups_that_wait_for_a_call_are_scored_together(sampling: Any) -> None:
    calls: list[list[int]] = []
    running = threading.Lock()

    def slow(data: DataProto, return_dict: bool) -> dict[str, Any]:
        assert running.acquire(blocking=False), "called twice at a time"
        calls.append(numbers_of(data))
        time.sleep(4 * SECONDS)
        running.release()
        return by_number(data, return_dict)

    collect(sampling(reward=slow, delay=lambda number: SECONDS * (number > 10) * (1 + number / 100)), range(10, 14))
    assert [len(numbers) for numbers in calls] == [N, 3 * N]


class Alone:
    """A reward whose scores depend on their rows alone, with its calls: the number of each row's prompt."""

    scores_rows_alone = True

    def __init__(self, failing: Callable[[int], bool] = lambda seed: False, compares_samples: bool = False) -> None:
        self.failing = failing
        self.compares_samples = compares_samples
        self.calls: list[list[int]] = []

    def __call__(self, data: DataProto, return_dict: bool) -> dict[str, Any]:
        self.calls.append(numbers_of(data))
        seeds = data.tensors["sampling_seed"].tolist()
        failed = [float(self.failing(seed)) for seed in seeds]
        if all(failed):
            cause = ValueError("no answer")
            raise AllRowsFailedError("f", "math", {"ValueError('no')": len(seeds)}, "reward.py:1 in f") from cause
        scores = [0.0 if fail else seed % 7 for seed, fail in zip(seeds, failed)]
        acc = [None if fail else score for score, fail in zip(scores, failed)]
        return scores_of(data, scores, reward_failed=failed, acc=acc)


def test_samples_are_scored_while_others_of_their_prompt_generate(sampling: Any) -> None:
    alone, together = Alone(), Alone(compares_samples=True)
    batches = []
    for reward in (alone, together):
        made = sampling(reward=reward, sample_delay=lambda place: 6 * SECONDS * place)
        batch, metrics, timing = collect(made, range(10, 14))
        batches.append(batch)
        assert metrics["perf/reward_hidden_s"] >= 0 and timing["reward"] < timing["gen"]
    assert sorted(alone.calls[0]) == [10, 11, 12, 13] and sorted(chain(*alone.calls)) == numbers_of(batches[0])
    assert together.calls[0].count(together.calls[0][0]) == N  # all samples of a prompt in one call
    a, b = batches
    assert a.tensors.keys() == b.tensors.keys() and a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in tensors_of(a.batch))
    assert all(list(a.non_tensor_batch[key]) == list(b.non_tensor_batch[key]) for key in a.non_tensor_batch)


def test_a_sample_that_fails_alone_scores_zero(sampling: Any, caplog: pytest.LogCaptureFixture) -> None:
    (prompts,) = prompts_of(range(10, 14))
    seeds = sampling().sampler.prepare(prompts, step=1, draw=0).rows.tensors["sampling_seed"].tolist()
    made = sampling(reward=Alone(failing=lambda seed: seed in (seeds[3], seeds[4])), delay=lambda n: SECONDS * n / 10)
    batch, _, _ = collect(made, range(10, 14))
    expected = [0.0 if place in (3, 4) else seed % 7 for place, seed in enumerate(seeds)]
    assert batch.tensors["token_level_scores"].sum(-1).tolist() == expected
    assert list(batch.non_tensor_batch["acc"]) == expected
    assert list(batch.non_tensor_batch["reward_failed"]) == [float(place in (3, 4)) for place in range(8)]
    assert caplog.text.count("ValueError: no answer") <= 1


def test_samples_that_all_fail_alone_stop_the_run(sampling: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = sampling(reward=Alone(failing=lambda seed: True), sample_delay=lambda place: 4 * SECONDS * place)
    with pytest.raises(AllRowsFailedError, match="f failed on 8 of 8 samples"):
        collect(made, range(10, 14))
    assert caplog.text.count("ValueError: no answer") == 1  # the traceback, once


def test_calls_of_the_reward_function_are_not_too_many(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_scorer, "MIN_INTERVAL_S", 1000.0)
    reward = Alone()
    batch, _, _ = collect(sampling(reward=reward, delay=lambda number: SECONDS * (number - 10)), range(10, 14))
    assert [len(call) for call in reward.calls] == [N, 3 * N], "the last one when nothing is generated"
    assert numbers_of(batch) == [10, 10, 11, 11, 12, 12, 13, 13]


def test_sync_sampling_names_the_mode_that_hides_slow_rewards(sampling: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = sampling(reward=Alone())
    for gen_s, reward_s in ((1.0, 0.5), (100.0, 10.0)):  # short, or a small share
        made._suggest_async(gen_s, reward_s)
    sampling(reward=by_number)._suggest_async(5.0, 5.0)  # needs the whole batch
    assert "mode=async" not in caplog.text
    made._suggest_async(10.0, 4.0)
    made._suggest_async(10.0, 4.0)
    assert caplog.text.count("rewards took 4.0 s after 10.0 s of generation; actor_rollout_ref.rollout.mode=async") == 1


FILTER = ("algorithm.filter_groups.enable=true",)


def test_filtered_groups_are_replaced_by_the_next_batch(sampling: Any) -> None:
    batch, metrics, _ = collect(sampling(*FILTER), range(10, 14), range(20, 24), range(30, 34))
    assert numbers_of(batch) == [11, 11, 13, 13, 21, 21, 23, 23]
    assert metrics["train/num_gen_batches"] == 2


def test_next_batch_is_drawn_while_the_last_groups_generate(sampling: Any) -> None:
    """Three of four groups are dropped: whatever the fourth scores, more prompts are needed."""
    made = sampling(*FILTER, delay=lambda number: 3 * SECONDS * (number == 11))
    began = time.perf_counter()
    batch, _, _ = collect(made, range(10, 13), range(20, 28), range(40, 44))
    assert numbers_of(batch)[::N] == [11, 21, 23, 25] and time.perf_counter() - began < 5 * SECONDS
    assert made.sampler.client.aborted == set(), "all were needed to know the first four"


def test_prompts_after_the_last_needed_one_are_aborted(sampling: Any) -> None:
    made = sampling(*FILTER, "data.gen_batch_size=16", delay=lambda number: 100.0 * (number == 29))
    batch, _, _ = collect(made, range(15, 31))
    assert numbers_of(batch)[::N] == [15, 17, 19, 21]
    assert made.sampler.client.aborted == {29}


def test_groups_are_judged_one_by_one(sampling: Any) -> None:
    """Each is scored by its own call, whose rows are freed if it is dropped: the next ones may have the same address."""
    made = sampling(
        *FILTER, "data.train_batch_size=8", "data.gen_batch_size=16", delay=lambda n: (n - 10) * SECONDS / 5
    )
    batch, _, _ = collect(made, range(10, 26), range(30, 46))
    assert numbers_of(batch)[::N] == list(range(11, 26, 2))


def test_too_many_batches(sampling: Any) -> None:
    made = sampling(*FILTER, "algorithm.filter_groups.max_num_gen_batches=2")
    with pytest.raises(
        ValueError, match=r"max_num_gen_batches=2: only 0 of 4 prompts have samples with different scores"
    ):
        collect(made, *[range(i, i + 1) for i in range(10, 30, 2)])


def test_failed_generation_ends_the_step_with_its_error(sampling: Any) -> None:
    def delay(number: int) -> float:
        if number == 12:
            raise RuntimeError("the engine is out of memory")
        return 100.0

    made = sampling(delay=delay)
    with pytest.raises(RuntimeError, match=r"^the engine is out of memory$"):
        collect(made, range(10, 14))
    assert made.sampler.client.aborted <= {10, 11, 13} and not made.sampler.client.is_running


def test_the_step_after_a_failure_waits_for_the_call_that_it_left_behind(sampling: Any) -> None:
    """As after a repair of the rollout: the reward function is never called twice at a time."""
    calling, began = threading.Lock(), threading.Event()

    def slow(data: DataProto, return_dict: bool) -> dict[str, Any]:
        assert calling.acquire(blocking=False), "called twice at a time"
        began.set()
        time.sleep(10 * SECONDS)
        calling.release()
        return by_number(data, return_dict)

    made = sampling(reward=slow)
    answer = made.sampler.client.generate

    async def fail_in_a_call(request: GenerationRequest, *, key: str = "") -> Completion:
        while request.prompt_ids == [13]:
            if began.is_set():
                raise ConnectionError("the rollout is gone")
            await asyncio.sleep(0.001)
        result: Completion = await answer(request, key=key)
        return result

    made.sampler.client.generate = fail_in_a_call
    with pytest.raises(ConnectionError):
        collect(made, range(10, 14))
    assert calling.locked()
    made.sampler.client.generate = answer
    batch, _, _ = collect(made, range(10, 14))
    assert numbers_of(batch)[::N] == [10, 11, 12, 13]


def test_failed_reward_ends_the_step_with_its_error(sampling: Any) -> None:
    def broken(data: DataProto, return_dict: bool) -> dict[str, Any]:
        raise KeyError("answer")

    made = sampling(reward=broken, delay=lambda number: 100.0 * (number > 10))
    with pytest.raises(KeyError, match="answer"):
        collect(made, range(10, 14))
    assert made.sampler.client.aborted == {11, 12, 13}


def failing(numbers: set[int]) -> Callable[..., dict[str, Any]]:
    """Like a manager whose function raises for these prompts."""

    def reward(data: DataProto, return_dict: bool) -> dict[str, Any]:
        rows = numbers_of(data)
        failed = [float(number in numbers) for number in rows]
        if all(failed):
            raise AllRowsFailedError("f", "math", {"ValueError('no')": len(rows)}, "reward.py:1 in f")
        return scores_of(
            data,
            [1.0 - fail for fail in failed],
            reward_failed=failed,
            acc=[None if f else row % N for row, f in enumerate(failed)],
        )

    return reward


def test_a_prompt_whose_samples_all_fail_scores_zero(sampling: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As in one call for the whole batch, also if the prompt is scored alone."""
    made = sampling(reward=failing({10}), delay=lambda number: SECONDS * (number > 10))
    batch, _, _ = collect(made, range(10, 14))
    assert batch.tensors["token_level_scores"].sum(-1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert list(batch.non_tensor_batch["reward_failed"]) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert list(batch.non_tensor_batch["acc"]) == [0, 0, 0, 1, 0, 1, 0, 1]
    assert "f failed on 2 of 2 samples" in caplog.text and caplog.text.rstrip().endswith("these samples score 0")


def test_a_batch_whose_samples_all_fail_stops_the_run(sampling: Any) -> None:
    made = sampling(reward=failing({10, 11, 12, 13}), delay=lambda number: SECONDS * (number > 10))
    with pytest.raises(AllRowsFailedError) as caught:
        collect(made, range(10, 14))
    assert "f failed on 8 of 8 samples, first on one of data_source 'math'; 8 of them with ValueError('no') at" in str(
        caught.value
    )


def test_a_prompt_whose_samples_all_fail_is_not_informative(sampling: Any) -> None:
    """It has no value of the metric."""
    made = sampling(*FILTER, "algorithm.filter_groups.metric=acc", reward=failing({10}), delay=lambda number: 0.0)
    batch, metrics, _ = collect(made, range(10, 11), range(11, 15))
    assert numbers_of(batch)[::N] == [11, 12, 13, 14] and metrics["train/num_gen_batches"] == 2


OVER = ("actor_rollout_ref.rollout.over_sample_rate=0.5",)


def test_step_ends_when_enough_prompts_are_complete(sampling: Any) -> None:
    made = sampling(*OVER, delay=lambda number: 100.0 * (number in (10, 12, 13, 16)))
    batch, metrics, _ = collect(made, range(10, 18))
    assert numbers_of(batch)[::N] == [11, 14, 15, 17]
    assert made.sampler.client.aborted == {10, 12, 13, 16} and metrics["train/num_unfinished_prompts"] == 4


def test_step_leaves_no_call_of_the_reward_function_behind(sampling: Any) -> None:
    """The next one may use the same workers, or a function that must not be called twice at a time."""
    running: set[int] = set()

    def slow(data: DataProto, return_dict: bool) -> dict[str, Any]:
        numbers = set(numbers_of(data))
        running.update(numbers)
        time.sleep(4 * SECONDS)
        running.difference_update(numbers)
        return by_number(data, return_dict)

    delays = {14: SECONDS, 15: 100.0, 16: 100.0, 17: 100.0}  # the call for 14 begins when the step is complete
    batch, _, _ = collect(sampling(*OVER, reward=slow, delay=lambda number: delays.get(number, 0.0)), range(10, 18))
    assert numbers_of(batch)[::N] == [10, 11, 12, 13] and not running


def test_validation_submits_in_turn_to_the_reward_model(sampling: Any) -> None:
    """Asynchronous training may score at the same time: ranks that get two calls in different orders wait for each other."""
    made = sampling()
    batch, _, _ = collect(made, range(10, 14))
    lock = made.sampler.client.submission

    class RewardModel:
        def compute_rm_score(self, data: DataProto) -> "RewardModel":
            assert lock.locked()
            return self

        def get(self) -> DataProto:
            assert not lock.locked()
            return DataProto.from_dict(tensors={"rm_scores": torch.ones(batch.tensors["responses"].shape)})

    made.rm_wg = RewardModel()
    assert made.score(batch, by_number).tensors["rm_scores"].all()


def test_function_of_a_whole_batch_gets_the_whole_batch(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [{'score': i / len(solution_strs), 'rows': len(solution_strs)} for i in range(len(solution_strs))]\n"
    )
    settings = [
        "actor_rollout_ref.rollout.mode=async",
        "reward_model.reward_manager=batch",
        f"custom_reward_function.path={tmp_path}/ranks.py",
    ]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", f"trainer.rollout_data_dir={tmp_path}/rows"]
    settings += ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={N}", "trainer.total_training_steps=1"]
    assert main([*overrides, *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert {row["rows"] for row in rows} == {len(rows)}


def test_too_few_rows_for_over_sampling(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*overrides, "actor_rollout_ref.rollout.over_sample_rate=0.8"]) == 2
    assert (
        "over_sample_rate=0.8: a step generates 20 prompts, but the dataset has only 16 rows" in capsys.readouterr().err
    )


def test_sample_returns_one_prompt_with_all_keys(sampling: Any) -> None:
    made = sampling(delay=lambda number: SECONDS * (number == 10))
    (prompts,) = prompts_of(range(10, 14))

    async def sample() -> list[DataProto]:
        async with made.sampler.running() as sampler:
            return await all_of(
                [sampler.sample(prompts[i : i + 1], step=1, draw=0, number=i) for i in range(len(prompts))]
            )

    groups = asyncio.run(sample())
    batch, _, _ = collect(made, range(10, 14))
    for number, group in enumerate(groups):
        rows = batch[number * N : (number + 1) * N]
        assert (
            group.tensors.keys() == rows.tensors.keys()
            and group.non_tensor_batch.keys() == rows.non_tensor_batch.keys()
        )
        assert all((group.tensors[key] == rows.tensors[key]).all() for key in tensors_of(rows.batch))
        assert list(group.non_tensor_batch["uid"]) == list(rows.non_tensor_batch["uid"])


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.name=embedded"),
        ("algorithm.adv_estimator=remax",),
        ("actor_rollout_ref.rollout.name=hf", "data.train_batch_size=2"),
    ],
    ids=["filter_groups", "baselines", "hf"],
)
def test_both_modes_train_to_the_same_bits(extra: tuple[str, ...], overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "even.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(map(ord, solution_str)) % 2\n"
    )
    settings = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={N}", *extra]
    settings += [f"custom_reward_function.path={tmp_path}/even.py", "reward_model.timeout_s=null"]
    settings += ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    weights, metrics = [], []
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        own = [f"actor_rollout_ref.rollout.mode={mode}", f"trainer.default_local_dir={folder}"]
        assert main([*overrides, *settings, *own]) == 0
        weights.append((folder / "global_step_2" / "actor" / "huggingface" / "model.safetensors").read_bytes())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics.append([{k: v for k, v in r.items() if not k.startswith(("time", "timing", "perf/"))} for r in rows])
    assert metrics[0] == metrics[1] and weights[0] == weights[1]
