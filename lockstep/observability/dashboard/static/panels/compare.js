"use strict";
// Two runs: settings, results; and two runs or two steps on the same prompts.

(() => {
  const { el, api, number, count } = Lockstep;
  const MOST_OPTIONS = 300;
  const KINDS = { validation: "validation", train: "training samples" };

  const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${number(value, 3)}`);
  /** What the reward function's `acc` says beside a score; nothing in dumps without it. */
  const accuracy = (acc) => (acc === null ? "" : `, acc ${number(acc, 3)}`);
  const accuracies = (left, right) => (left === null || right === null ? "" : `acc ${number(left, 3)} → ${number(right, 3)}`);
  const moved = (value) => (value > 0 ? "higher" : value < 0 ? "lower" : "same");
  /** Whether a prompt got better: by `acc`, or without it by the score. */
  function direction({ left, right, change }) {
    const by = left.acc === null || right.acc === null ? change : right.acc - left.acc;
    return by > 0 ? "better" : by < 0 ? "worse" : "same";
  }

  /** A control for a step: a list, or a number if there are too many. Empty is the last step. */
  function stepControl(label, steps, value, changed) {
    const control =
      steps.length > MOST_OPTIONS
        ? el("input", { type: "number", min: steps[0], max: steps.at(-1), placeholder: `last (${steps.at(-1)})` })
        : el("select", {}, el("option", { value: "" }, "last step"), steps.map((step) => el("option", { value: String(step) }, `step ${step}`)));
    control.setAttribute("aria-label", label);
    control.value = value;
    control.addEventListener("change", () => changed(control.value));
    return control;
  }

  function resultsTable(found) {
    const head = el("tr", {}, el("th", { scope: "col" }, "result"), found.runs.map((run) => el("th", { scope: "col" }, run)));
    const rows = found.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name), row.values.map((value) => el("td", {}, value))));
    return el("details", { open: true }, el("summary", {}, "Results"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
  }

  /** address: of the prompt's group in the rollouts. */
  function side(name, found, address) {
    const left = found.n - found.responses.length;
    return el(
      "div",
      {},
      el("h4", {}, el("a", { href: `#/rollouts?${new URLSearchParams({ ...address, group: found.group })}` }, name), `: score ${number(found.mean, 3)}${accuracy(found.acc)}`),
      found.responses.map((response) => [
        el("p", { class: "note" }, `score ${number(response.score, 3)}${accuracy(response.acc)}${response.length === null ? "" : `, ${count(response.length, "token")}`}`),
        el("div", { class: "text", tabindex: "0", role: "region", "aria-label": `response of ${name}` }, response.text ?? "(too long to be shown here)"),
      ]),
      left > 0 ? el("p", { class: "note" }, `and ${number(left)} more`) : null,
    );
  }

  Lockstep.panel({
    id: "compare",
    title: "Compare",
    async show(main, context) {
      const { params } = context;
      const left = context.run;
      const names = context.runs.map((run) => run.name);
      const right = names.includes(params.other) ? params.other : names.find((name) => name !== left) || left;
      const state = { kind: params.kind in KINDS ? params.kind : "validation", changed: params.changed === "1", page: Number(params.page) || 0 };
      const steps = { left: params.left_step || "", right: params.right_step || "" };

      const other = el("select", {}, names.map((name) => el("option", { value: name, selected: name === right }, name === left ? `${name} (the same run)` : name)));
      other.addEventListener("change", () => context.go("compare", { other: other.value }));
      const tables = el("div", { class: "settings" });
      const controls = el("div", { class: "controls" });
      const summary = el("p", { role: "status" });
      const list = el("div", {});
      const pages = el("div", { class: "controls" });
      main.append(el("div", { class: "controls" }, el("label", {}, `${left} against `, other)), tables, el("h2", {}, "On the same prompts"), controls, summary, list, pages);

      async function showTables() {
        if (left === right) return;
        const runs = [left, right];
        const [settings, results] = await Promise.all([
          Lockstep.settingsTable(runs).catch((error) => Lockstep.problem(error)),
          api("/api/compare/results", { runs: JSON.stringify(runs) }).then(resultsTable).catch((error) => Lockstep.problem(error)),
        ]);
        tables.replaceChildren(settings, results);
      }

      let dumps;
      function keep() {
        context.set({ other: right, kind: state.kind === "validation" ? null : state.kind, left_step: steps.left, right_step: steps.right, changed: state.changed ? "1" : null, page: state.page || null });
      }
      function change(more) {
        Object.assign(state, { page: 0 }, more);
        keep();
        buildControls();
        showPrompts();
      }
      function buildControls() {
        const [leftSteps, rightSteps] = dumps.map((found) => found[state.kind].steps);
        const kind = el("select", {}, Object.entries(KINDS).map(([name, title]) => el("option", { value: name, selected: name === state.kind }, title)));
        kind.addEventListener("change", () => {
          steps.left = steps.right = "";
          change({ kind: kind.value });
        });
        const changed = el("input", { type: "checkbox", checked: state.changed });
        changed.addEventListener("change", () => change({ changed: changed.checked }));
        const choose = (which) => (value) => {
          steps[which] = value;
          change({});
        };
        if (left === right && leftSteps.length > 1 && !steps.left) steps.left = String(leftSteps[0]);
        controls.replaceChildren(
          el("label", {}, "Prompts of ", kind),
          leftSteps.length ? el("span", {}, `${left}: `, stepControl(`step of ${left}`, leftSteps, steps.left, choose("left"))) : "",
          rightSteps.length ? el("span", {}, `${right}: `, stepControl(`step of ${right}, right side`, rightSteps, steps.right, choose("right"))) : "",
          el("label", {}, changed, " only changed"),
        );
      }

      let asked = 0;
      async function showPrompts() {
        const own = ++asked;
        pages.replaceChildren();
        const why = dumps.map((found, index) => found[state.kind].why && `${index ? right : left}: ${found[state.kind].why}`).filter(Boolean);
        if (why.length) {
          summary.textContent = "";
          list.replaceChildren(...[...new Set(why)].map((text) => el("p", { class: "note" }, text)));
          return;
        }
        let found;
        try {
          found = await api("/api/compare/prompts", {
            kind: state.kind,
            left,
            left_step: steps.left || undefined,
            right,
            right_step: steps.right || undefined,
            changed: state.changed ? "1" : undefined,
            page: state.page || undefined,
          });
        } catch (error) {
          if (own === asked) {
            summary.textContent = "";
            list.replaceChildren(Lockstep.problem(error));
          }
          return;
        }
        if (own !== asked) return;
        const titles = [`${left}, step ${found.left_step}`, `${right}, step ${found.right_step}`];
        const addresses = [
          { run: left, kind: state.kind, step: found.left_step },
          { run: right, kind: state.kind, step: found.right_step },
        ];
        const all = found.summary;
        summary.textContent = all.num_pairs
          ? `${count(all.num_pairs, "prompt")} in both (${number(found.left_prompts)} and ${number(found.right_prompts)}; matched by ${found.matched_by}). Mean score ${number(all.left, 3)} → ${number(all.right, 3)}: ` +
            `${signed(all.change)}${all.error === null ? "" : ` ± ${number(1.96 * all.error, 2)} (95 %)`}; the score is higher for ${number(all.num_better)}, lower for ${number(all.num_worse)}, the same for ${number(all.num_pairs - all.num_better - all.num_worse)}.` +
            (all.left_acc === null ? "" : ` Mean ${accuracies(all.left_acc, all.right_acc)}${all.left_acc === all.right_acc ? ": no change" : ""}.`)
          : `No prompt is in both (${number(found.left_prompts)} and ${number(found.right_prompts)} prompts).`;
        list.replaceChildren(
          ...found.items.map((item) =>
            el(
              "section",
              { class: "pair" },
              el("h3", {}, el("span", { class: direction(item) }, `score ${signed(item.change)} ${moved(item.change)}`), [accuracies(item.left.acc, item.right.acc), item.prompt].filter(Boolean).map((part) => ` · ${part}`)),
              el("div", { class: "sides" }, side(titles[0], item.left, addresses[0]), side(titles[1], item.right, addresses[1])),
            ),
          ),
        );
        const last = Math.max(0, Math.ceil(found.total / found.per_page) - 1);
        const move = (by) => () => change({ page: state.page + by });
        if (last)
          pages.replaceChildren(
            el("button", { type: "button", disabled: state.page === 0, onclick: move(-1) }, "Previous"),
            `page ${state.page + 1} of ${last + 1}`,
            el("button", { type: "button", disabled: state.page >= last, onclick: move(1) }, "Next"),
          );
      }

      showTables();
      dumps = await Promise.all([left, right].map((run) => api("/api/dumps", { run })));
      if (!params.kind && dumps.some((found) => !found.validation.steps.length) && dumps.every((found) => found.train.steps.length)) state.kind = "train";
      buildControls();
      await showPrompts();
    },
  });
})();
