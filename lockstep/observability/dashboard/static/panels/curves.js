"use strict";
// Curves of one or several runs.

Lockstep.panel({
  id: "curves",
  title: "Curves",
  async show(main, context) {
    const { el, api, chart, plain } = Lockstep;
    const names = (await api("/api/metrics", { run: context.run })).map((metric) => metric.name);
    const metric = context.params.metric || (names.includes("critic/score/mean") ? "critic/score/mean" : names[0]);
    const select = el("select", {}, ...names.map((name) => el("option", { value: name, selected: name === metric }, name)));
    const figure = el("div", { class: "chart" });
    main.append(el("label", {}, "Metric ", select), figure);
    async function draw() {
      const curve = await api("/api/curve", { run: context.run, metric: select.value });
      chart(figure, [{ x: curve.step, y: curve.value, name: plain(context.run), mode: "lines" }], { title: { text: plain(select.value) } });
    }
    select.addEventListener("change", () => {
      context.set({ metric: select.value });
      draw();
    });
    context.onChange((change) => change.run === context.run && draw());
    await draw();
    return () => Plotly.purge(figure);
  },
});
