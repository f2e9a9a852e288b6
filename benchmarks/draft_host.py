"""The host's work on steps with drafts from history, without a device: everything but the model.

    python benchmarks/draft_host.py [--rows 32 64 192 --drafts 4 --right 1.0 0.9 --new-tokens 512] [--profile]

The engine schedules, drafts and reads as on CUDA. Its kernels are replaced by a timetable: a decode step takes --fixed-ms and
--token-us per token of its graph, a capture --capture-ms, and the sampled tokens are those of answers of which the share --right is
in the history. The engine's clock counts these times and the host's processor time, so its controller decides as it would there.

"host" is the processor time from one step with drafts to the next, per row: a tenth of all steps take less. "captures" are the
graphs of steps with drafts. "plain" and "drafts" are seconds of that clock for all answers, captures included: the best of
--repeats runs; "first" is the first one, in which graphs are captured.
"""

import argparse
import cProfile
import pstats
import random
import sys
import time
from collections.abc import Iterator, Sequence as Rows
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from history_drafts import load_model
from torch import Tensor

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig, RolloutConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded import step_loop
from lockstep.engines.rollout.embedded.cuda import draft_graphs, graphs
from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.cuda.decoder import CudaDecoder
from lockstep.engines.rollout.embedded.draft_step import KeptTokens
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.history import prompt_key
from lockstep.engines.rollout.embedded.sampler import SampledTokens
from lockstep.engines.rollout.embedded.scheduler import DecodeWindow
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.kernels import sampling


class Clock:
    """Processor time without that of the simulation, plus what the device is waited for.

    simulated_s: seconds spent on simulating.
    free_at:     when the device has done what was launched.
    """

    def __init__(self) -> None:
        self.simulated_s = 0.0
        self.waited_s = 0.0
        self.free_at = 0.0

    def host(self) -> float:
        return time.process_time() - self.simulated_s

    def now(self) -> float:
        return self.host() + self.waited_s

    def wait(self, until: float) -> None:
        self.waited_s += max(0.0, until - self.now())

    def launch(self, seconds: float) -> float:
        """When work that takes as long will be done."""
        self.free_at = max(self.free_at, self.now()) + seconds
        return self.free_at

    @contextmanager
    def simulating(self) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.simulated_s += time.process_time() - began


class Timetable:
    """Seconds of steps and captures, and the tokens that are sampled.

    texts: prompt and answer of each request, by its seed.
    """

    def __init__(self, clock: Clock, args: argparse.Namespace) -> None:
        self.clock = clock
        self.fixed_s = args.fixed_ms / 1e3
        self.token_s = args.token_us / 1e6
        self.capture_s = args.capture_ms / 1e3
        self.texts = np.zeros((1, 1), np.int32)

    def step_s(self, size: int) -> float:
        return self.fixed_s + self.token_s * size

    def sampled(self, slots: DecodeSlots, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The tokens after these positions."""
        return self.texts[slots.host_constants[slot, 0], np.minimum(position + 1, self.texts.shape[1] - 1)]


def simulate(graphs: Any, timetable: Timetable) -> None:
    """Count captures of these graphs, and compute nothing."""

    def capture(size: int, filtered: bool) -> Any:
        timetable.clock.waited_s += timetable.capture_s
        graphs.num_captures += 1
        return SimpleNamespace()

    graphs.num_captures = 0
    graphs.use_graphs = True
    graphs._warm_up = lambda size, filtered: None
    graphs._capture = capture


class SimulatedDecoder(CudaDecoder):
    """The decoder of CUDA devices with a timetable for a device. host_us: from one step with drafts to the next, per row."""

    def __init__(self, timetable: Timetable, *args: Any, **kwargs: Any) -> None:
        self.timetable = timetable
        super().__init__(*args, **kwargs)
        for each in self._all_graphs():
            simulate(each, timetable)
        self.host_us: list[float] = []
        self.step_tokens: list[int] = []
        self._last_drafts: float | None = None  # the host's time after the last step if it had drafts

    def sample_first(self, sequences: Rows[Sequence], logits_NV: Tensor) -> SampledTokens:
        slots = self.slots.assign(sequences)
        self.slots.set_states(sequences, slots)
        return self._sample(slots, num_steps=1, seconds=0.0)

    def run(self, window: DecodeWindow) -> SampledTokens:
        sequences = [sequence for sequence, _ in window.rows]
        slots = self.slots.assign(sequences)
        self.slots.set_states(sequences, slots)
        self.slots.set_tables(sequences, slots)
        size = graphs.padded_batch_size(len(slots))
        self.slots.set_rows(slots, size)
        self._last_drafts = None
        return self._sample(slots, window.num_steps, window.num_steps * self.timetable.step_s(size))

    def _sample(self, slots: list[int], num_steps: int, seconds: float) -> SampledTokens:
        with self.timetable.clock.simulating():
            state = self.slots.slot_state.numpy()
            place = np.array(slots)
            tokens = np.full((num_steps, len(state)), -1, np.int32)
            for step in range(num_steps):
                position = state[place, sampling.POSITION]
                is_active = state[place, sampling.ACTIVE] > 0
                sampled = self.timetable.sampled(self.slots, place, position)
                tokens[step, place] = np.where(is_active, sampled, -1)
                state[place, sampling.POSITION] += is_active
                state[place, sampling.ACTIVE] &= position + 1 < state[place, sampling.LAST]
            done = self.timetable.clock.launch(seconds)
            ready: Any = SimpleNamespace(synchronize=lambda: self.timetable.clock.wait(done))
            log_probs = torch.zeros(tokens.shape)
        return SampledTokens(torch.from_numpy(tokens), log_probs, slots, ready)

    def run_drafts(self, window: DecodeWindow) -> KeptTokens:
        kept = super().run_drafts(window)
        clock = self.timetable.clock
        if self._last_drafts is not None:
            self.host_us.append(1e6 * (clock.host() - self._last_drafts) / len(window.rows))
            self.step_tokens.append(sum(1 + len(window.drafts.get(s.index, ())) for s, _ in window.rows))
        self._last_drafts = clock.host()
        return kept


def simulated_run(decoder: SimulatedDecoder) -> Any:
    """Takes the place of `DraftGraphs.run`."""
    made: Any = decoder.draft_graphs

    def run(num_rows: int, filtered: bool, num_steps: int) -> None:
        timetable = decoder.timetable
        with timetable.clock.simulating():
            rows = made._host
            inputs = rows.inputs.numpy()[:, :num_rows]
            slot, position = inputs[draft_graphs.SLOT_ID], rows.state.numpy()[:num_rows, sampling.POSITION]
            made._outputs[0, :num_rows] = torch.from_numpy(timetable.sampled(decoder.slots, slot, position))
            timetable.clock.wait(timetable.clock.launch(timetable.step_s(made.size_of(num_rows))))

    return run


def engine_of(
    model: Any, num_rows: int, args: argparse.Namespace, timetable: Timetable, enable: bool
) -> EmbeddedEngine:
    config = RolloutConfig(
        prompt_length=args.prompt_tokens,
        response_length=args.new_tokens,
        max_num_seqs=max(num_rows, 256),
        seed=0,
        free_cache_engine=False,
        history_drafts=HistoryDraftsConfig(enable=enable, max_draft_tokens=args.drafts),
    )
    engine = EmbeddedEngine(config, eos_token_ids=(), pad_token_id=0)
    engine.bind(model)
    engine.generate([GenerationRequest([5, 6], SamplingParams(max_tokens=2), seed=0)])  # compares it with transformers
    loop = engine.step_loop
    assert loop is not None and loop.runner is not None
    if engine.drafter is not None:
        engine.drafter.use_cuda()
    draft_sizes = () if engine.drafter is None else engine.drafter.controller.sizes
    loop._decoder = decoder = SimulatedDecoder(
        timetable, loop.runner, engine.scheduler, engine.max_model_len, False, 4, draft_sizes=draft_sizes
    )
    if decoder.draft_graphs is not None:
        decoder.draft_graphs.run = simulated_run(decoder)  # type: ignore[method-assign]
    return engine


def measure(model: Any, num_rows: int, right: float, args: argparse.Namespace) -> None:
    rng = random.Random(num_rows)
    vocabulary = model.config.vocab_size
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    texts = [[rng.randrange(vocabulary) for _ in range(args.prompt_tokens + args.new_tokens)] for _ in range(num_rows)]
    requests = [GenerationRequest(text[: args.prompt_tokens], params, seed=i) for i, text in enumerate(texts)]
    answers = [text[args.prompt_tokens :] for text in texts]
    seconds: dict[bool, list[float]] = {}
    for enable in (False, True):
        clock = Clock()
        step_loop.now = clock.now
        timetable = Timetable(clock, args)
        timetable.texts = np.array(texts, np.int32)
        engine = engine_of(model, num_rows, args, timetable, enable)
        decoder: Any = engine.step_loop._decoder  # type: ignore[union-attr]
        profiler = cProfile.Profile()
        for repeat in range(args.repeats):
            if engine.drafter is not None:
                engine.drafter.history.clear()
                for request, answer in zip(requests, answers):
                    seen = [t if rng.random() < right else rng.randrange(vocabulary) for t in answer]
                    engine.drafter.history.add(prompt_key(request), seen)
                engine.drafter.take_metrics()
            began = clock.now()
            if args.profile and enable and repeat == args.repeats - 1:
                profiler.enable()
            found = engine.generate(requests)
            profiler.disable()
            seconds.setdefault(enable, []).append(clock.now() - began)
            assert [c.token_ids for c in found] == answers, "other tokens were sampled"
    plain, drafts = min(seconds[False]), min(seconds[True])
    metrics = engine.draft_metrics()
    host_us = np.percentile(decoder.host_us or [0], 10)
    print(
        f"{num_rows:4d} rows  {right:.2f} right  host {host_us:5.1f} us per row and step  plain {plain:.2f} s  "
        f"drafts {drafts:.2f} s ({plain / drafts:.2f}x)  first {seconds[True][0]:.2f} s  captures "
        f"{decoder.draft_graphs.num_captures}  accepted {metrics.get('perf/drafts/acceptance', 0):.2f}  "
        f"tokens of a step {np.mean(decoder.step_tokens or [0]):.0f}",
        flush=True,
    )
    if args.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 192])
    parser.add_argument("--right", type=float, nargs="+", default=[1.0, 0.9])
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a row")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--fixed-ms", type=float, default=8.0)
    parser.add_argument("--token-us", type=float, default=5.0)
    parser.add_argument("--capture-ms", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(argv)
    torch.cuda.Stream = lambda device: None  # type: ignore[assignment,misc]
    model = load_model(argparse.Namespace(device="cpu", model=None), "tiny")
    for num_rows in args.rows:
        for right in args.right:
            measure(model, num_rows, right, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
