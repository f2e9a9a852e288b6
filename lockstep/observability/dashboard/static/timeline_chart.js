"use strict";
// Draws what the controller and the workers did, and when: in the dashboard, and in the page of `lockstep timeline`.

/**
 * data:    {tracks: [{role, rank, lanes}], spans: [[step, name, track, lane, begin_us, end_us], ...]}; each track's spans by begin.
 * tell:    called with the words about a span that the keyboard has reached.
 * ctrlKey: zoom by the wheel only with Ctrl, so that the page can be scrolled.
 * Returns {fit(begin_us, end_us), zoom(factor), redraw(), range: [begin_us, end_us]}.
 */
function timelineChart(chart, data, { tell = () => {}, ctrlKey = false } = {}) {
  const LANE = 20;
  const HEAD = 20;
  const LABEL = 16;
  let height = HEAD;
  const tracks = data.tracks.map((track) => {
    const top = height;
    height += LABEL + track.lanes * LANE + 4;
    return { ...track, top };
  });
  chart.style.height = height + "px";
  const range = timelineRange(data.spans);
  let view = range;
  let selected = -1; // in data.spans
  let grabbed = null;

  function add(kind, text) {
    const node = document.createElement("div");
    node.className = kind;
    if (text) node.textContent = text;
    chart.appendChild(node);
    return node;
  }

  function words([step, name, track, , begin, end]) {
    const { role, rank } = tracks[track];
    return `${label(step, name)}: ${timelineSeconds(end - begin)}, from ${timelineSeconds(begin)} (step ${step}, ${role} rank ${rank})`;
  }

  function label(step, name) {
    return name === "step" ? `step ${step}` : name;
  }

  function redraw() {
    const width = chart.clientWidth;
    const scale = width / (view[1] - view[0]);
    chart.replaceChildren();
    const rough = ((view[1] - view[0]) / width) * 110;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
    for (let at = Math.ceil(view[0] / gap) * gap; at < view[1]; at += gap)
      add("tick", timelineSeconds(at)).style.left = (at - view[0]) * scale + "px";
    for (const track of tracks) {
      add("track").style.top = track.top + "px";
      add("label", `${track.role} rank ${track.rank}`).style.top = track.top + 1 + "px";
    }
    data.spans.forEach((span, index) => {
      const [step, name, track, lane, begin, end] = span;
      if (end < view[0] || begin > view[1]) return;
      const left = Math.max(0, (begin - view[0]) * scale);
      const right = Math.min(width, (end - view[0]) * scale);
      const node = add(index === selected ? "span selected" : "span", right - left > 24 ? label(step, name) : "");
      node.title = words(span);
      node.style.cssText =
        `left:${left}px; width:${Math.max(1, right - left)}px; background:${timelineColour(name)};` +
        `top:${tracks[track].top + LABEL + lane * LANE}px`;
    });
  }

  function fit(begin, end) {
    const margin = (end - begin) * 0.01 || 1;
    view = [begin - margin, end + margin];
    redraw();
  }

  function zoom(factor, share = 0.5) {
    if (factor < 1 && view[1] - view[0] < 10) return; // microseconds
    const at = view[0] + share * (view[1] - view[0]);
    view = [at - (at - view[0]) * factor, at + (view[1] - at) * factor];
    redraw();
  }

  function select(index) {
    if (index < 0 || index >= data.spans.length) return;
    selected = index;
    const [, , , , begin, end] = data.spans[index];
    if (end < view[0] || begin > view[1]) {
      const half = (view[1] - view[0]) / 2;
      view = [(begin + end) / 2 - half, (begin + end) / 2 + half];
    }
    redraw();
    tell(words(data.spans[index]));
  }

  /** The span of the next or previous track whose begin is nearest to that of the selected one. */
  function beside(direction) {
    const [, , track, , begin] = data.spans[selected];
    const target = track + direction;
    let best = -1;
    data.spans.forEach((span, index) => {
      if (span[2] === target && (best < 0 || Math.abs(span[4] - begin) < Math.abs(data.spans[best][4] - begin))) best = index;
    });
    return best;
  }

  const keys = {
    ArrowRight: () => select(selected + 1),
    ArrowLeft: () => select(selected - 1),
    ArrowDown: () => select(selected < 0 ? 0 : beside(1)),
    ArrowUp: () => select(selected < 0 ? 0 : beside(-1)),
    "+": () => zoom(0.8),
    "-": () => zoom(1.25),
    0: () => fit(...range),
  };
  chart.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  chart.addEventListener(
    "wheel",
    (event) => {
      if (ctrlKey && !event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - chart.getBoundingClientRect().left) / chart.clientWidth);
    },
    { passive: false },
  );
  chart.addEventListener("pointerdown", (event) => {
    grabbed = [event.clientX, ...view];
    chart.setPointerCapture(event.pointerId);
    chart.classList.add("moving");
  });
  chart.addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    const moved = ((grabbed[0] - event.clientX) / chart.clientWidth) * (grabbed[2] - grabbed[1]);
    view = [grabbed[1] + moved, grabbed[2] + moved];
    redraw();
  });
  for (const end of ["pointerup", "pointercancel"])
    chart.addEventListener(end, () => {
      grabbed = null;
      chart.classList.remove("moving");
    });
  fit(...range);
  return { fit, zoom, redraw, range };
}

function timelineRange(spans) {
  return spans.reduce(([begin, end], s) => [Math.min(begin, s[4]), Math.max(end, s[5])], [Infinity, -Infinity]);
}

const TIMELINE_COLOURS = {
  step: "#6f757e",
  gen: "#3b6fb6",
  reward: "#8a6414",
  old_log_prob: "#477a46",
  ref: "#7a6bb0",
  values: "#2f7f7f",
  adv: "#a05195",
  update_critic: "#b4532d",
  update_actor: "#c23b4f",
  update_weights: "#8c6d46",
  testing: "#4f7a9e",
  save_checkpoint: "#666666",
};
const TIMELINE_PHASES = {
  generate_sequences: "gen",
  begin_generation: "gen",
  advance_generation: "gen",
  compute_log_prob: "old_log_prob",
  compute_ref_log_prob: "ref",
  compute_values: "values",
  compute_rm_score: "reward",
};

/** The colour of a phase, or of a worker's call that belongs to it. */
function timelineColour(name) {
  const phase = Object.hasOwn(TIMELINE_PHASES, name) ? TIMELINE_PHASES[name] : name;
  if (Object.hasOwn(TIMELINE_COLOURS, phase)) return TIMELINE_COLOURS[phase];
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
  return `hsl(${hash}, 35%, 42%)`;
}

function timelineSeconds(us) {
  return us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(1) + " ms" : us.toFixed(0) + " µs";
}
