"""Draw the pictures of the documentation: `python docs/assets/draw.py` writes the SVG files of this folder that PICTURES names.

A picture has its own background and follows the reader's light or dark colours. Text is text, and a title and a description say the
same in words.
"""

import tomllib
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH = 960
STYLE = """
text { font: 14px system-ui, sans-serif; fill: var(--ink) }
.small { font-size: 12px; fill: var(--faint) }
.bold { font-weight: 600 }
.stage { font-weight: 600; font-size: 12px }
.code { font-family: ui-monospace, monospace; font-size: 13px }
.line { fill: none; stroke: var(--line); stroke-width: 1.6 }
.frame { fill: none; stroke: var(--line); stroke-width: 1.2; stroke-dasharray: 5 4 }
.policy { fill: var(--policy) } .critic { fill: var(--critic) } .frozen { fill: var(--frozen) }
.data { fill: var(--data) } .plain { fill: var(--plain) } .idle { fill: none; stroke: var(--line); stroke-dasharray: 3 4 }
"""
LIGHT = {
    "paper": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "line": "#6e7781",
    "policy": "#c7dcff", "critic": "#ffd9b8", "frozen": "#dbe3ea", "data": "#cdebd3", "plain": "#eef1f4",
}  # fmt: skip
DARK = {
    "paper": "#171b21", "ink": "#e9edf2", "faint": "#aab4bf", "line": "#8b949e",
    "policy": "#22488a", "critic": "#7a4313", "frozen": "#3d4853", "data": "#22593a", "plain": "#2a313a",
}  # fmt: skip


class Picture:
    """SVG elements in the order in which they are drawn; lengths in pixels of a drawing that is WIDTH wide."""

    def __init__(self, height: int, title: str, description: str) -> None:
        self.height, self.title, self.description = height, title, description
        self._elements: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self._elements.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str, style: str = "") -> None:
        """A filled box; its first line is bold, the others are small. style: of the first line, instead of bold."""
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'
        )
        top = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * number, line, "small" if number else style or "bold", "middle")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self._elements.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="frame"/>')

    def line(self, *points: tuple[float, float], arrow: bool = False) -> None:
        places = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._elements.append(f'<polyline points="{places}" class="line"{end}/>')

    def svg(self) -> str:
        light, dark = (" ".join(f"--{name}: {value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
        arrow = '<path d="M0 0 L10 5 L0 10 z" style="fill: var(--line)"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
                f'height="{self.height}" role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>:root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{STYLE}</style>",
                '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
                f'orient="auto">{arrow}</marker></defs>',
                f'<rect width="{WIDTH}" height="{self.height}" rx="8" style="fill: var(--paper)"/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def step() -> Picture:
    stages = [
        ("data", "prompts", "rows of a", "file"),
        ("policy", "rollout", "n samples", "per prompt"),
        ("data", "reward", "function", "or model"),
        ("policy", "old log-probs", "actor", "forward"),
        ("frozen", "ref log-probs", "reference", "forward"),
        ("critic", "values", "critic", "forward"),
        ("data", "advantages", "on the", "controller"),
        ("critic", "update critic", "value", "loss"),
        ("policy", "update actor", "policy", "loss"),
    ]
    picture = Picture(
        208,
        "One training step",
        "Prompts, rollout, reward, old log-probs, reference log-probs, values, advantages, update of the critic, update of the "
        "actor, one after another. The rollout of the next step decodes with the tensors that the update has changed. Without a "
        "critic its two stages are left out, without a KL term the reference.",
    )
    width, gap = 98.0, 5.5
    for number, (kind, *lines) in enumerate(stages):
        x = 14 + number * (width + gap)
        picture.box(x, 20, width, 76, kind, *lines, style="stage")
        if number:
            picture.line((x - gap, 58), (x - 0.5, 58))
    first, last = 14 + (width + gap) + width / 2, 14 + 8 * (width + gap) + width / 2
    picture.line((last, 96), (last, 128), (first, 128), (first, 99), arrow=True)
    middle = (first + last) / 2
    picture.text(
        middle, 148, "the next step decodes with the updated tensors: one set of weights, no copy", anchor="middle"
    )
    legend = [("policy", "policy: trains and generates"), ("critic", "critic, if there is one")]
    legend += [("frozen", "reference, if a KL term needs it"), ("data", "no model, or the reward's own")]
    for number, (kind, words) in enumerate(legend):
        picture.box(22 + 235 * number, 174, 18, 18, kind)
        picture.text(46 + 235 * number, 188, words, "small")
    return picture


ROLE_KINDS = {
    "actor": "policy",
    "rollout": "policy",
    "actor = rollout": "policy",
    "critic": "critic",
    "ref": "frozen",
    "rm": "data",
}
PLACEMENTS = {
    "colocate": [("global_pool", 8, ["actor = rollout", "ref", "critic", "rm"])],
    "hybrid": [("actor_pool", 4, ["actor = rollout", "ref"]), ("critic_pool", 4, ["critic", "rm"])],
    "split": [("actor_pool", 3, ["actor", "ref"]), ("critic_pool", 3, ["critic", "rm"]), ("rollout_pool", 2, ["rollout"])],
    "standalone": [
        ("actor_pool", 2, ["actor"]), ("rollout_pool", 2, ["rollout"]), ("critic_pool", 2, ["critic"]),
        ("ref_pool", 1, ["ref"]), ("rm_pool", 1, ["rm"]),
    ],
}  # fmt: skip
"""Placement -> pools of eight GPUs: name, GPUs, roles."""


def placements() -> Picture:
    words = "; ".join(
        f"{name}: " + ", ".join(f"{', '.join(roles)} on {count}" for _, count, roles in pools)
        for name, pools in PLACEMENTS.items()
    )
    left, per_gpu, bar = 130.0, 101.5, 26.0
    heights = {name: bar * max(len(roles) for _, _, roles in pools) + 8 for name, pools in PLACEMENTS.items()}
    arrows = [name for name, pools in PLACEMENTS.items() if any(roles == ["rollout"] for _, _, roles in pools)]
    picture = Picture(
        int(44 + sum(heights.values()) + 16 * len(heights) + 26 * len(arrows)),
        "The four placements on eight GPUs",
        f"Which roles share GPUs. {words}. With split and standalone the actor sends its weights to the rollout after each update.",
    )
    for number in range(8):
        picture.text(left + per_gpu * (number + 0.5) - 4, 24, f"GPU {number}", "small", "middle")
    y = 36.0
    for name, pools in PLACEMENTS.items():
        picture.text(14, y + heights[name] / 2 + 5, name, "bold code")
        x = left
        ends: dict[str, tuple[float, float]] = {}
        for _, count, roles in pools:
            width = per_gpu * count - 8
            picture.frame(x, y, width, bar * len(roles) + 8)
            for place, role in enumerate(roles):
                picture.box(x + 5, y + 5 + bar * place, width - 10, bar - 2, ROLE_KINDS[role], role, style="stage")
                ends[role] = x + width / 2, y + bar * len(roles) + 8
            x += per_gpu * count
        y += heights[name] + 16
        if name in arrows:
            (start, top), (end, bottom) = ends["actor"], ends["rollout"]
            picture.line((start, top), (start, y), (end, y), (end, bottom + 2), arrow=True)
            picture.text((start + end) / 2, y + 15, "weights after each update", "small", "middle")
            y += 26
    return picture


def staleness() -> Picture:
    picture = Picture(
        500,
        "Staleness in asynchronous training",
        "Three modes over time. Synchronous: generation and update take turns, staleness 0. one_step_off: the next batch is "
        "generated while the actor trains, so a batch is trained on one update after the policy that wrote it, staleness 1. "
        "fully_async: responses go on through weight updates; a group that policy 0 began and policy 2 trains on has staleness 2, "
        "the bound of trainer.max_staleness=2.",
    )
    left, unit = 138.0, 134.5
    picture.text(14, 34, "synchronous", "bold")
    picture.text(14, 54, "all GPUs", "small")
    for number in range(3):
        x = left + 2 * unit * number
        picture.box(x, 20, unit - 4, 44, "policy", f"batch {number + 1}", f"written by v{number}")
        picture.box(x + unit, 20, unit - 4, 44, "critic", f"update → v{number + 1}", "staleness 0")
    picture.line((14, 84), (946, 84))
    picture.text(14, 114, "one_step_off", "bold code")
    picture.text(14, 144, "rollout GPUs", "small")
    picture.text(14, 196, "training GPUs", "small")
    for number in range(6):
        x = left + unit * number
        picture.box(x, 118, unit - 4, 44, "policy", f"batch {number + 1}", f"written by v{max(0, number - 1)}")
        if number:
            picture.box(
                x, 170, unit - 4, 44, "critic", f"update → v{number}", f"batch {number}, staleness {int(number > 1)}"
            )
        else:
            picture.box(x, 170, unit - 4, 44, "idle", "waits", style="small")
    picture.line((14, 234), (946, 234))
    picture.text(14, 264, "fully_async", "bold code")
    picture.text(14, 284, "max_staleness=2", "small")
    lanes = [
        [(0.0, 0.8), (0.8, 1.6), (1.6, 2.6), (2.6, 3.5), (3.5, 4.4), (4.4, 6.0)],
        [(0.0, 2.95), (2.95, 3.8), (3.8, 4.7), (4.7, 6.0)],
        [(0.0, 1.15), (1.15, 2.2), (2.2, 3.95), (3.95, 5.2), (5.2, 6.0)],
    ]
    starts = [1.0, 2.0, 3.0, 4.0, 5.0]  # of updates; their weights come a unit later
    for start in starts:
        picture.line((left + unit * (start + 1) - 2, 392), (left + unit * (start + 1) - 2, 258))
    for lane, spans in enumerate(lanes):
        y = 266.0 + 38 * lane
        for begin, end in spans:
            first, last = (sum(start + 1 <= moment for start in starts) for moment in (begin, end))
            words = f"v{first}" if first == last else f"v{first} to v{last}"
            is_marked = (begin, end) == (0.0, 2.95)
            words = f"{words}, trained on by v2: staleness 2" if is_marked else words
            style = "stage" if is_marked else "small"
            picture.box(left + unit * begin, y, unit * (end - begin) - 4, 30, "policy", words, style=style)
    picture.text(14, 324, "rollout GPUs,", "small")
    picture.text(14, 340, "groups in flight", "small")
    picture.text(14, 420, "training GPUs", "small")
    picture.box(left, 394, unit - 4, 44, "idle", "waits", style="small")
    for number, start in enumerate(starts):
        picture.box(left + unit * start, 394, unit - 4, 44, "critic", f"update → v{number + 1}", "finished groups")
    picture.text(
        left,
        474,
        "A line is the end of an update: responses go on with its weights, and every token keeps the version that wrote it.",
        "small",
    )
    picture.text(left + 6 * unit - 4, 490, "time →", "small", "end")
    return picture


def packing() -> Picture:
    picture = Picture(
        330,
        "Rows of a batch and the packed tokens",
        "Four rows: two samples of prompt p, two of prompt q, each padded to the same length. Packed: p once, then its two "
        "responses, then q once and its two responses, without padding. Each response attends to its prompt and to itself. 40 "
        "places become 21 tokens.",
    )
    prompts, responses = {"p": 4, "q": 3}, [("p", "r", 3), ("p", "s", 2), ("q", "t", 4), ("q", "u", 5)]
    size, left = 38.0, 130.0
    most_prompt, most_response = 5, 5
    picture.text(14, 32, "rows", "bold")
    picture.text(left, 32, "prompt, padded on the left", "small")
    picture.text(left + size * most_prompt + 24, 32, "response, padded on the right", "small")
    for row, (prompt, name, length) in enumerate(responses):
        y = 44 + row * size
        picture.text(14, y + 24, f"sample {row % 2 + 1} of {prompt}", "small")
        for column in range(most_prompt):
            index = column - most_prompt + prompts[prompt] + 1
            words = (f"{prompt}{index}",) if index > 0 else ()
            picture.box(
                left + column * size, y, size - 3, size - 3, "frozen" if words else "idle", *words, style="code"
            )
        for column in range(most_response):
            words = (f"{name}{column + 1}",) if column < length else ()
            x = left + size * most_prompt + 24 + column * size
            picture.box(x, y, size - 3, size - 3, "policy" if words else "idle", *words, style="code")
    picture.text(560, 96, "Prompts are the same in all rows of a group,")
    picture.text(560, 118, "so each is computed once, and padding never.")
    picture.text(560, 146, "t1 attends to q1 … q3 and itself, u1 likewise:", "small")
    picture.text(560, 164, "the loss is that of the padded rows.", "small")
    picture.line((left + 200, 200), (left + 200, 226), arrow=True)
    picture.text(14, 262, "packed", "bold")
    x, order = (
        left,
        [
            ("p", 4, "frozen"),
            ("r", 3, "policy"),
            ("s", 2, "policy"),
            ("q", 3, "frozen"),
            ("t", 4, "policy"),
            ("u", 5, "policy"),
        ],
    )
    for name, length, kind in order:
        start = x
        for number in range(length):
            picture.box(x, 238, size - 3, size - 3, kind, f"{name}{number + 1}", style="code")
            x += size
        words = "prompt, once" if kind == "frozen" else "response"
        picture.line((start, 282), (x - 3, 282))
        picture.text((start + x) / 2, 300, words, "small", "middle")
    return picture


def layers() -> Picture:
    """The layers of pyproject.toml, which `lint-imports` checks."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    (contract,) = (c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    rows = [[name.removeprefix("lockstep.") for name in layer.split(" | ")] for layer in contract["layers"]]
    height, gap = 34.0, 8.0
    picture = Picture(
        int(30 + len(rows) * (height + gap)),
        "The layers of the source tree",
        "From top to bottom: " + "; ".join(", ".join(row) for row in rows) + ". Imports go downward only.",
    )
    left, width = 150.0, WIDTH - 150.0 - 14
    bottom = 16 + len(rows) * (height + gap)
    picture.line((70, 22), (70, bottom - 16), arrow=True)
    picture.text(84, bottom / 2, "imports", "small")
    picture.text(84, bottom / 2 + 16, "go down", "small")
    for number, row in enumerate(rows):
        kind = "policy" if number < 5 else "critic" if number < 9 else "data" if number < 11 else "frozen"
        each = width / len(row)
        for place, name in enumerate(row):
            picture.box(left + place * each, 16 + number * (height + gap), each - gap, height, kind, name, style="code")
    return picture


PICTURES = {"step": step, "placements": placements, "staleness": staleness, "packing": packing, "layers": layers}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
