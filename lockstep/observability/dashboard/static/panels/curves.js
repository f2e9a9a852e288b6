"use strict";
// Curves: any metrics of one or several runs.

(() => {
  const { el, api, plain, number } = Lockstep;
  const COLOURS = ["#2f7ed8", "#e07b00", "#2ca05a", "#c8453b", "#9467bd", "#8c6d31", "#d6509c", "#5f7d8c", "#8a9a00", "#12a3b4"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const AXES = { step: "step", samples: "samples", tokens: "tokens", hours: "hours since the first step" };
  const WINDOWS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  const MOST_CHARTS = 60;
  const REFRESH_MS = 3000;

  /** Names in a parameter: a JSON list, or one name. */
  function names(text) {
    if (!text) return [];
    try {
      const found = JSON.parse(text);
      if (Array.isArray(found)) return found.map(String);
    } catch {
      // one name
    }
    return [text];
  }

  const listed = (chosen) => (chosen.length === 1 && !chosen[0].startsWith("[") ? chosen[0] : JSON.stringify(chosen));

  /** The mean of the points in the last `window` steps. Of a thinned curve the means of its buckets are averaged. */
  function smoothed(curve, axis, window) {
    const source = curve.means || curve;
    const x = source[axis] || [];
    let first = 0;
    const y = source.value.map((_, index) => {
      while (source.step[first] <= source.step[index] - window && first < index) first++;
      const values = source.value.slice(first, index + 1).filter((value) => value !== null);
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null; // not a running sum: a spike would stay in it
    });
    return { x, y };
  }

  /** What is no number is marked at the height of the value before it. */
  function oddPoints(curve, axis) {
    const x = [];
    const y = [];
    let height = curve.value.find((value) => value !== null) ?? 0;
    curve.value.forEach((value, index) => {
      if (value !== null) height = value;
      else {
        x.push(curve[axis][index]);
        y.push(height);
      }
    });
    return { x, y };
  }

  function traces(run, index, curve, band, options) {
    const axis = options.axis;
    const colour = COLOURS[index % COLOURS.length];
    const line = { color: colour, width: 2, dash: DASHES[Math.floor(index / COLOURS.length + index) % DASHES.length] };
    const shared = { legendgroup: run, mode: "lines" };
    const found = [];
    if (band && band.step.length) {
      const at = new Map(curve.step.map((step, place) => [step, curve[axis][place]]));
      const x = band.step.map((step) => at.get(step) ?? null);
      const edge = { ...shared, x, line: { width: 0, color: colour }, hoverinfo: "skip", showlegend: false };
      found.push({ ...edge, y: band.low }, { ...edge, y: band.high, fill: "tonexty", fillcolor: `${colour}33` });
    }
    const few = curve.value.length < 40;
    const raw = { ...shared, mode: few ? "lines+markers" : "lines", marker: { size: 5, color: colour }, x: curve[axis], y: curve.value, line, name: plain(run) };
    if (options.window > 1) {
      found.push({ ...raw, mode: "lines", line: { ...line, width: 1 }, opacity: 0.3, hoverinfo: "skip", showlegend: false });
      found.push({ ...shared, ...smoothed(curve, axis, options.window), line, name: plain(run) });
    } else found.push(raw);
    if (curve.non_finite) {
      const marker = { symbol: "x", size: 8, color: colour };
      found.push({ ...oddPoints(curve, axis), legendgroup: run, mode: "markers", marker, name: "not a number", hovertemplate: "not a number", showlegend: false });
    }
    return found;
  }

  function note(curves, options) {
    const said = [];
    for (const [run, curve] of curves) {
      const who = curves.length > 1 ? `${run}: ` : "";
      if (!curve.points) said.push(`${who}does not have it`);
      else if (!curve[options.axis]) said.push(`${who}${options.axis} are not known`);
      if (curve.means) said.push(`${who}${number(curve.value.length)} of ${number(curve.points)} points, highest and lowest kept`);
      if (curve.non_finite) said.push(`${who}${number(curve.non_finite)} values are not numbers (✕)`);
      if (options.log && curve.value.some((value) => value !== null && value <= 0)) said.push(`${who}values of 0 and less are left out`);
    }
    return said.join("; ");
  }

  /** Text that no spreadsheet takes for a formula. */
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return `"${text.replaceAll('"', '""')}"`;
  }

  function csv(metric, curves) {
    const axes = Object.keys(AXES);
    const lines = [["run", ...axes, metric].map(cell).join(",")];
    for (const [run, curve] of curves)
      curve.step.forEach((_, index) => lines.push([run, ...axes.map((axis) => curve[axis]?.[index]), curve.value[index]].map(cell).join(",")));
    return `${lines.join("\n")}\n`;
  }

  function download(name, text) {
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** One metric: title, meaning, chart. It asks for its data when it comes into view. */
  class Figure {
    constructor(metric, meaning, remove) {
      this.metric = metric;
      this.curves = [];
      this.stale = true;
      this.visible = false;
      this.asked = 0;
      this.chart = el("div", { class: "chart", role: "img", "aria-label": `chart of ${metric}` });
      this.note = el("p", { class: "note" });
      const save = el("button", { type: "button", title: "Download the points as CSV", "aria-label": `Download ${metric} as CSV` }, "CSV");
      save.addEventListener("click", () => download(`${metric.replaceAll(/[^\w.@-]+/g, "_")}.csv`, csv(metric, this.curves)));
      const close = el("button", { type: "button", title: "Remove this chart", "aria-label": `Remove ${metric}`, onclick: remove }, "×");
      this.element = el("figure", {}, el("figcaption", {}, el("h3", {}, metric), save, close), el("p", { class: "meaning" }, Lockstep.prose(meaning || "")), this.chart, this.note);
      this.element.figure = this;
    }

    async load(runs, options) {
      if (!this.visible) return;
      const asked = ++this.asked;
      this.stale = false;
      try {
        const curves = await Promise.all(runs.map(async (run) => [run, await api("/api/curve", { run, metric: this.metric })]));
        if (asked !== this.asked) return;
        this.curves = curves;
        await this.draw(options);
        if (!/^val-.*\/mean@\d+$/.test(this.metric)) return;
        const bands = await Promise.all(runs.map((run) => api("/api/band", { run, metric: this.metric }).catch(() => null)));
        if (asked !== this.asked) return;
        this.bands = bands;
        await this.draw(options);
      } catch (error) {
        if (asked === this.asked) this.note.replaceChildren(Lockstep.problem(error));
      }
    }

    async draw(options) {
      if (!this.curves.length) return;
      const known = this.curves.filter(([, curve]) => curve[options.axis]);
      const all = known.flatMap(([run, curve]) => traces(run, options.runs.indexOf(run), curve, this.bands?.[options.runs.indexOf(run)], options));
      const drawn = Lockstep.chart(this.chart, all, {
        margin: { l: 56, r: 12, t: 8, b: 40 },
        showlegend: this.curves.length > 1,
        uirevision: `${options.axis} ${options.log}`, // the zoom stays while these do
        xaxis: { title: { text: AXES[options.axis], standoff: 8 } },
        yaxis: { type: options.log ? "log" : "linear", exponentformat: "e" },
      });
      const prompts = Math.max(0, ...(this.bands || []).flatMap((band) => (band ? band.prompts : [])));
      this.note.textContent = [note(this.curves, options), prompts ? `band: 95 % confidence over ${number(prompts)} prompts` : ""].filter(Boolean).join("; ");
      await drawn;
      if (this.chart.dataset.synchronised) return;
      this.chart.dataset.synchronised = "yes";
      const tell = (name) => (detail) => this.element.dispatchEvent(new CustomEvent(name, { bubbles: true, detail }));
      this.chart.on("plotly_relayout", tell("zoomed"));
      this.chart.on("plotly_hover", tell("pointed"));
      this.chart.on("plotly_unhover", tell("unpointed"));
    }

    forget() {
      this.asked += 1;
      Lockstep.purge(this.chart);
    }
  }

  /** A search box over checkboxes. groups: name -> [{name, title}]. */
  function chooser(label, groups, chosen, changed) {
    const boxes = [];
    const filter = el("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${label}` });
    const fields = [...groups].map(([group, items]) => {
      const rows = items.map((item) => {
        const box = el("input", { type: "checkbox", value: item.name, checked: chosen().includes(item.name) });
        box.addEventListener("change", () => changed(item.name, box.checked));
        const row = el("label", { class: "choice", title: item.title || null }, box, ` ${item.name}`);
        boxes.push({ box, row, text: `${item.name} ${item.title || ""}`.toLowerCase() });
        return row;
      });
      return el("fieldset", {}, group ? el("legend", {}, group) : null, rows);
    });
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const { row, text } of boxes) row.hidden = !words.every((word) => text.includes(word));
      for (const field of fields) field.hidden = ![...field.querySelectorAll("label")].some((row) => !row.hidden);
    });
    return {
      element: el("div", { class: "chooser" }, filter, el("div", { class: "choices" }, fields)),
      update: () => boxes.forEach(({ box }) => (box.checked = chosen().includes(box.value))),
    };
  }

  async function settingsTable(runs) {
    if (runs.length < 2) return null;
    const found = await api("/api/settings", { runs: JSON.stringify(runs) });
    const head = el("tr", {}, el("th", { scope: "col" }, "setting"), found.runs.map((run) => el("th", { scope: "col" }, run)));
    const rows = found.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.key), row.values.map((value) => el("td", {}, value))));
    return el(
      "details",
      { class: "settings", open: true },
      el("summary", {}, `Settings that differ (${found.rows.length})`),
      found.rows.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))) : el("p", {}, "No setting differs."),
      found.left_out ? el("p", { class: "note" }, `${found.left_out} settings that not all of the runs have are left out.`) : null,
      found.unread.map((text) => el("p", { class: "problem" }, text)),
    );
  }
  Lockstep.settingsTable = settingsTable;

  Lockstep.panel({
    id: "curves",
    title: "Curves",
    async show(main, context) {
      const known = new Map(); // metric -> {name, group, meaning, main}
      const params = context.params;
      let runs = [context.run, ...names(params.with).filter((name) => name !== context.run && context.runs.some((run) => run.name === name))];
      const options = {
        runs,
        axis: params.x in AXES ? params.x : "step",
        log: params.log === "1",
        window: WINDOWS.includes(Number(params.smooth)) ? Number(params.smooth) : 1,
      };
      async function learn(run) {
        for (const metric of await api("/api/metrics", { run })) if (!known.has(metric.name) || metric.main !== null) known.set(metric.name, metric);
      }
      const waiting = el("p", { class: "note", role: "status" }, "Reading the metrics…");
      main.append(waiting);
      const [first] = await Promise.allSettled(runs.map(learn));
      waiting.remove();
      if (first.status === "rejected") throw first.reason;
      if (!known.size) {
        main.append(el("p", {}, "This run has no metrics yet."));
        context.onChange((change) => change.run === context.run && context.reload());
        return null;
      }
      const mains = () => [...known.values()].filter((metric) => metric.main !== null).sort((a, b) => a.main - b.main).map((metric) => metric.name);
      let chosen = names(params.metric);
      const shown = () => (chosen.length ? chosen : mains().length ? mains() : [...known.keys()].slice(0, 6)).slice(0, MOST_CHARTS);

      const grid = el("div", { class: "grid" });
      const settings = el("div", {});
      const pickers = el("div", { class: "pickers" });
      let figures = [];
      const observer = new IntersectionObserver(
        (entries) => {
          for (const entry of entries) {
            const figure = entry.target.figure;
            figure.visible = entry.isIntersecting;
            if (figure.visible && figure.stale) figure.load(runs, options);
          }
        },
        { rootMargin: "300px" },
      );

      function build() {
        const kept = new Map(figures.map((figure) => [figure.metric, figure]));
        figures = shown().map((name) => kept.get(name) || new Figure(name, known.get(name)?.meaning, () => choose(name, false)));
        for (const figure of kept.values()) {
          if (figures.includes(figure)) continue;
          observer.unobserve(figure.element);
          figure.forget();
        }
        grid.replaceChildren(...figures.map((figure) => figure.element));
        for (const figure of figures) observer.observe(figure.element);
      }
      const redraw = () => figures.forEach((figure) => figure.draw(options));
      async function reload() {
        const before = known.size;
        await Promise.allSettled(runs.map(learn));
        if (known.size > before) {
          buildPickers();
          build(); // metrics that the run did not have before, such as the first validation's
        }
        for (const figure of figures) {
          figure.stale = true;
          figure.load(runs, options);
        }
      }
      function choose(name, on) {
        chosen = on ? [...shown(), name] : shown().filter((each) => each !== name);
        context.set({ metric: chosen.length ? listed(chosen) : null });
        build();
        picked.update();
      }
      async function chooseRun(name, on) {
        runs = on ? [...runs, name] : runs.filter((each) => each !== name);
        options.runs = runs;
        context.set({ with: runs.length > 1 ? listed(runs.filter((each) => each !== context.run)) : null });
        if (on) await learn(name).catch(() => null);
        buildPickers();
        build();
        reload();
        await showSettings();
      }
      async function showSettings() {
        const asked = runs.join("\n");
        const table = await settingsTable(runs).catch(Lockstep.problem.bind(Lockstep));
        if (asked === runs.join("\n")) settings.replaceChildren(...(table ? [table] : []));
      }

      let picked;
      function buildPickers() {
        const groups = new Map();
        for (const metric of [...known.values()].sort((a, b) => (a.name < b.name ? -1 : 1)))
          groups.set(metric.group, [...(groups.get(metric.group) || []), { name: metric.name, title: metric.meaning }]);
        picked = chooser("metrics", groups, shown, choose);
        const open = [...pickers.querySelectorAll("details")].map((details) => details.open);
        const others = context.runs.filter((run) => run.name !== context.run).map((run) => ({ name: run.name, title: run.folder }));
        const runPicker = others.length ? chooser("runs", new Map([["", others]]), () => runs, chooseRun) : null;
        const reset = el("button", { type: "button" }, "Main metrics");
        reset.addEventListener("click", () => {
          chosen = [];
          context.set({ metric: null });
          build();
          picked.update();
        });
        pickers.replaceChildren(
          el("details", { open: open[0] }, el("summary", {}, `Choose metrics (${known.size})`), reset, picked.element),
          ...(runPicker ? [el("details", { open: open[1] }, el("summary", {}, `Compare with other runs (${others.length})`), runPicker.element)] : []),
        );
      }

      const axis = el("select", {}, Object.entries(AXES).map(([name, title]) => el("option", { value: name, selected: name === options.axis }, title)));
      axis.addEventListener("change", () => {
        options.axis = axis.value;
        context.set({ x: axis.value === "step" ? null : axis.value });
        redraw();
      });
      const log = el("input", { type: "checkbox", checked: options.log });
      log.addEventListener("change", () => {
        options.log = log.checked;
        context.set({ log: log.checked ? "1" : null });
        redraw();
      });
      const said = el("output", {});
      const smooth = el("input", { type: "range", min: 0, max: WINDOWS.length - 1, step: 1, "aria-label": "Smoothing" });
      smooth.value = WINDOWS.indexOf(options.window);
      const say = () => {
        said.textContent = options.window > 1 ? `mean of ${options.window} steps` : "off";
        smooth.setAttribute("aria-valuetext", said.textContent);
      };
      smooth.addEventListener("input", () => {
        options.window = WINDOWS[Number(smooth.value)];
        context.set({ smooth: options.window > 1 ? String(options.window) : null });
        say();
        redraw();
      });
      say();
      // The pointer in one chart shows the values at the same place in the others.
      const others = (event) => figures.filter((figure) => figure.visible && figure.element !== event.target && figure.chart.data?.length);
      grid.addEventListener("pointed", (event) => {
        const [point] = event.detail.points;
        if (point && event.detail.event) for (const figure of others(event)) Plotly.Fx.hover(figure.chart, { xval: point.x }, "xy");
      });
      grid.addEventListener("unpointed", (event) => event.detail?.event && others(event).forEach((figure) => Plotly.Fx.unhover(figure.chart)));
      let zooming = false;
      grid.addEventListener("zoomed", async (event) => {
        const change = Object.fromEntries(Object.entries(event.detail).filter(([key]) => key.startsWith("xaxis.")));
        if (zooming || !Object.keys(change).length) return;
        zooming = true; // all charts show the same steps
        await Promise.all(figures.filter((figure) => figure.element !== event.target && figure.chart.data).map((figure) => Plotly.relayout(figure.chart, change)));
        zooming = false;
      });

      main.append(
        el("div", { class: "controls" }, el("label", {}, "Over ", axis), el("label", {}, "Smoothing ", smooth, " ", said), el("label", {}, log, " log scale")),
        pickers,
        settings,
        grid,
      );
      buildPickers();
      build();
      showSettings();
      let timer = null;
      context.onChange((change) => {
        if (!runs.includes(change.run) || timer) return;
        timer = setTimeout(() => {
          timer = null;
          reload();
        }, REFRESH_MS);
      });
      return () => {
        clearTimeout(timer);
        observer.disconnect();
        figures.forEach((figure) => figure.forget());
      };
    },
  });
})();
