"use strict";
// Time and memory: the spans of a step by worker, phases over the run, throughput, asynchronous training, memory beside the plan.

Lockstep.panel({
  id: "time",
  title: "Time and memory",
  async show(main, context) {
    const { el, api, chart, plain, number, duration } = Lockstep;
    const run = context.run;
    const charts = [];
    let following = !context.params.step;
    let unit = context.params.unit === "seconds" ? "seconds" : "share";
    let drawn = null; // the timeline
    let asked = 0; // counts calls of drawStep: only the newest may draw
    let shown = null; // its data

    // One step by worker
    const stepInput = el("input", { type: "number", min: 0, id: "step", class: "step" });
    const ranksInput = el("input", { type: "text", id: "ranks", size: 12, placeholder: "all, or 0-7,16", value: context.params.ranks || "" });
    const earlier = el("button", { type: "button", disabled: true, onclick: () => go(shown.previous) }, "Earlier");
    const later = el("button", { type: "button", disabled: true, onclick: () => go(shown.next) }, "Later");
    const follow = el("input", { type: "checkbox", checked: following });
    const note = el("p", { class: "muted" });
    const told = el("p", { role: "status" });
    const picture = el("div", {
      class: "timeline",
      tabIndex: 0,
      role: "application",
      "aria-label": "Spans of the step by worker: arrow keys move between spans, plus and minus zoom, 0 shows the whole step",
    });
    const calls = el("div", { class: "scroll" });
    const zoomed = (factor) => () => drawn && drawn.zoom(factor);
    const stepProblem = el("div");
    main.append(
      el("h2", {}, "One step, by worker"),
      el(
        "div",
        { class: "controls" },
        el("label", {}, "Step ", stepInput),
        earlier,
        later,
        el("label", {}, follow, " Follow the newest"),
        el("label", {}, "Ranks ", ranksInput),
        el("button", { type: "button", onclick: zoomed(0.5), "aria-label": "Zoom in" }, "+"),
        el("button", { type: "button", onclick: zoomed(2), "aria-label": "Zoom out" }, "−"),
        el("button", { type: "button", onclick: () => drawn && drawn.fit(...drawn.range) }, "Whole step"),
      ),
      stepProblem,
      note,
      el("div", { class: "rows" }, picture),
      told,
      el("details", {}, el("summary", {}, "Calls of this step, over all ranks"), calls),
    );

    async function drawStep(step) {
      const own = ++asked;
      let data;
      try {
        data = await api("/api/timeline", { run, step, ranks: ranksInput.value.trim() || undefined });
      } catch (error) {
        if (own === asked) stepProblem.replaceChildren(Lockstep.problem(error));
        return;
      }
      if (own !== asked) return; // another step was chosen meanwhile
      stepProblem.replaceChildren();
      const isNew = !shown || shown.step !== data.step || shown.num_spans !== data.spans.length || shown.ranks !== ranksInput.value;
      shown = { ...data, num_spans: data.spans.length, ranks: ranksInput.value };
      if (document.activeElement !== stepInput) stepInput.value = data.step;
      stepInput.max = data.last;
      earlier.disabled = data.previous === null;
      later.disabled = data.next === null;
      if (!isNew) return;
      const hidden = data.num_rows - data.tracks.length;
      note.textContent =
        "Ctrl and wheel zoom, dragging moves. Host time of each process, by its machine's clock." +
        (hidden > 0 ? ` ${data.tracks.length} of ${number(data.num_rows)} rows are shown: choose others by their ranks.` : "") +
        (data.spans_left_out ? ` The shortest ${number(data.spans_left_out)} spans are left out.` : "");
      const fresh = picture.cloneNode(false);
      const old = main.querySelector(".timeline");
      const focused = document.activeElement === old;
      old.replaceWith(fresh);
      if (focused) fresh.focus();
      fresh.dataset.step = data.step;
      drawn = timelineChart(fresh, data, { ctrlKey: true, tell: (text) => (told.textContent = text) });
      const several = data.calls.some((call) => call.ranks > 1);
      const extremes = (call) => [`${duration(call.min)} (rank ${call.fastest})`, `${duration(call.max)} (rank ${call.slowest})`];
      calls.replaceChildren(
        table(
          ["Worker", "Call", "Ranks", "Mean", ...(several ? ["Fastest rank", "Slowest rank"] : [])],
          data.calls.map((call) => [call.role, call.name, number(call.ranks), duration(call.mean), ...(call.ranks > 1 ? extremes(call) : several ? ["", ""] : [])]),
        ),
      );
    }

    function go(step) {
      following = follow.checked = false;
      context.set({ step, ranks: ranksInput.value });
      return drawStep(step);
    }

    stepInput.addEventListener("change", () => stepInput.value !== "" && go(Number(stepInput.value)));
    ranksInput.addEventListener("change", () => {
      context.set({ ranks: ranksInput.value });
      drawStep(following ? undefined : shown ? shown.step : undefined);
    });
    follow.addEventListener("change", () => {
      following = follow.checked;
      context.set({ step: following || !shown ? "" : shown.step });
      if (following) drawStep();
    });

    // Over the run
    const units = el(
      "select",
      {},
      el("option", { value: "share", selected: unit === "share" }, "share of the step, %"),
      el("option", { value: "seconds", selected: unit === "seconds" }, "seconds per step"),
    );
    const phases = figure("tall");
    const throughput = figure();
    const asynchronous = el("div", { class: "grid" });
    const overRun = el("div");
    main.append(
      el("h2", {}, "Phases over the run, by step"),
      el("div", { class: "controls" }, el("label", {}, "Unit ", units)),
      overRun,
      phases,
      el("h2", {}, "Tokens per second and GPU, by step"),
      throughput,
      asynchronous,
    );
    units.addEventListener("change", () => {
      unit = units.value;
      context.set({ unit });
      drawRun();
    });

    async function drawRun() {
      let data;
      try {
        data = await api("/api/time", { run });
      } catch (error) {
        overRun.replaceChildren(Lockstep.problem(error));
        return;
      }
      overRun.replaceChildren(
        data.phases.length
          ? data.steps_per_point > 1
            ? el("p", { class: "muted" }, `Each point is the mean of ${data.steps_per_point} steps.`)
            : ""
          : el("p", {}, "No timing_s/* metrics yet."),
      );
      phases.hidden = !data.phases.length;
      if (data.phases.length) {
        const colour = (name) => (name === "other" ? "#8a8f98" : timelineColour(name));
        const mode = data.step.length > 1 ? "lines" : "lines+markers";
        draw(
          phases,
          data.phases.map((phase) => ({
            x: data.step,
            y: phase.seconds,
            name: plain(phase.name),
            mode,
            stackgroup: "all",
            groupnorm: unit === "share" ? "percent" : "",
            line: { width: 0.5, color: colour(phase.name) },
            fillcolor: colour(phase.name),
            hovertemplate: unit === "share" ? "%{y:.1f} %" : "%{y:.3g} s",
          })),
          { yaxis: { title: { text: unit === "share" ? "%" : "s" }, rangemode: "tozero" } },
        );
      }
      throughput.hidden = !data.throughput.step.length;
      throughput.previousElementSibling.hidden = throughput.hidden;
      if (!throughput.hidden) curve(throughput, data.throughput);
      const names = data.async.map((each) => each.name);
      const known = [...asynchronous.querySelectorAll("section")].map((section) => section.dataset.metric);
      if (names.join() !== known.join())
        asynchronous.replaceChildren(
          ...data.async.map((each) => {
            const section = el("section", {}, el("h3", {}, each.name), el("p", { class: "muted" }, each.meaning || ""), figure("small"));
            section.dataset.metric = each.name;
            return section;
          }),
        );
      data.async.forEach((each, index) => curve(asynchronous.children[index].lastChild, each));
    }

    function curve(element, data) {
      draw(element, [{ x: data.step, y: data.value, name: plain(data.name), mode: data.step.length > 1 ? "lines" : "markers" }], {
        showlegend: false,
        yaxis: { rangemode: "tozero" },
        margin: { l: 56, r: 12, t: 12, b: 40 },
      });
    }

    function figure(size = "") {
      return el("div", { class: `chart ${size}` });
    }

    function draw(element, traces, layout) {
      if (!charts.includes(element)) charts.push(element);
      return chart(element, traces, layout);
    }

    // Memory and the plan
    const memory = el("div");
    const memoryChart = figure();
    main.append(el("h2", {}, "Memory by phase"), memory, memoryChart);
    const plan = el("div");
    main.append(el("h2", {}, "Seconds beside the plan"), plan);

    async function drawMemory() {
      let data;
      try {
        data = await api("/api/memory", { run });
      } catch (error) {
        memory.replaceChildren(Lockstep.problem(error));
        return;
      }
      const problem = data.plan_problem ? Lockstep.problem(data.plan_problem) : "";
      const measured = data.memory.some((row) => row.peak !== null);
      const onCpu = data.gpu === "cpu";
      memoryChart.hidden = !data.memory.length || (onCpu && !measured); // a plan for the CPU alone: next to nothing of its memory
      if (!data.memory.length) {
        memory.replaceChildren(problem, el("p", {}, "This run reports no GPU memory (perf/max_memory_*): it runs on CPU, or no step has ended yet."));
      } else {
        const whole = Object.entries(data.since_start).map(([name, value]) => `${name} ${number(value, 3)} GiB`);
        memory.replaceChildren(
          problem,
          el(
            "p",
            {},
            measured ? "" : `${onCpu ? "A run on CPU reports no memory" : "The run reports no GPU memory"}, so only the plan is shown. `,
            data.gpu ? `Planned for ${onCpu ? "the CPU" : data.gpu}` : "",
            data.gpu_memory_gib ? ` with ${number(data.gpu_memory_gib, 3)} GiB${onCpu ? " of memory" : ""}. ` : "",
            whole.length ? `Largest since the start: ${whole.join(", ")}.` : "",
          ),
          el(
            "div",
            { class: "scroll" },
            measured
              ? table(
                  ["Phase", "Peak of the run, GiB", "Last step, GiB", "In use on the GPU, GiB", "Planned, GiB", "Peak of the plan"],
                  data.memory.map((row) => [row.phase, gib(row.peak), gib(row.last), gib(row.used), gib(row.planned), percent(row.peak, row.planned, 2)]),
                )
              : table(["Phase", "Planned, GiB"], data.memory.map((row) => [row.phase, gib(row.planned)])),
          ),
        );
        const names = data.memory.map((row) => plain(row.phase));
        const bar = (name, key, pattern) => ({ type: "bar", name, x: names, y: data.memory.map((row) => row[key]), marker: { pattern: { shape: pattern } } });
        const traces = [bar("peak of the run", "peak", ""), bar("in use on the GPU", "used", "."), bar("planned", "planned", "/")];
        const limit = data.gpu_memory_gib;
        if (!memoryChart.hidden) draw(memoryChart, traces.filter((trace) => trace.y.some((value) => value !== null)), {
          barmode: "group",
          yaxis: { title: { text: "GiB" }, rangemode: "tozero" },
          shapes: limit ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { dash: "dash", color: "#b3261e" } }] : [],
          annotations: limit ? [{ xref: "paper", x: 1, y: limit, yshift: 10, text: onCpu ? "memory" : "memory of the GPU", showarrow: false, xanchor: "right" }] : [],
        });
      }
      plan.replaceChildren(
        data.has_plan
          ? el(
              "div",
              { class: "scroll" },
              table(
                ["Phase", "Median of the run", "Planned", "Median of the plan"],
                data.seconds.map((row) => [row.phase, duration(row.median), duration(row.planned), percent(row.median, row.planned, 1)]),
              ),
            )
          : el("p", {}, "This run has no plan.json, so there is nothing to compare its phases with."),
      );
    }

    const gib = (value) => (value === null ? "–" : value.toFixed(2));
    /** A share of the plan; none if one of the two is shown as 0 with this number of digits. */
    const percent = (value, planned, digits) => ([value, planned].every((each) => Number((each ?? 0).toFixed(digits))) ? `${Math.round((100 * value) / planned)} %` : "–");

    function table(heads, rows) {
      return el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell))))),
      );
    }

    // Live
    let busy = false;
    let again = false;
    async function refresh() {
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      do {
        again = false;
        await Promise.all([following ? drawStep() : undefined, drawRun(), drawMemory()]);
      } while (again);
      busy = false;
    }
    context.onChange((change) => change.run === run && refresh());
    const resized = () => drawn && drawn.redraw();
    window.addEventListener("resize", resized);
    await Promise.all([drawStep(following ? undefined : context.params.step), drawRun(), drawMemory()]);
    return () => {
      window.removeEventListener("resize", resized);
      charts.forEach((each) => Lockstep.purge(each));
    };
  },
});
