"use strict";
// The prompts and responses of a step: filters, groups side by side, search, and the same prompt over the steps.

Lockstep.panel({
  id: "rollouts",
  title: "Rollouts",
  async show(main, context) {
    const { el, api, chart, number, count } = Lockstep;
    const KINDS = { train: "training", validation: "validation" };
    const FILTERS = Lockstep.rolloutFilters;
    const DEFAULTS = { kind: "train", view: "groups", sort: "file", order: "desc" };
    const SORTS = {
      file: "order of the file",
      reward: "reward",
      length: "length",
      variance: "spread of scores",
      advantage: "advantage",
      turns: "turns",
      tool_errors: "tool errors",
    };
    const state = { ...DEFAULTS, page: 0, ...context.params, page: Number(context.params.page) || 0 };
    if (!(state.kind in KINDS)) state.kind = DEFAULTS.kind;
    let dumps = await api("/api/dumps", { run: context.run });
    if (!context.params.kind && !dumps.train.steps.length && dumps.validation.steps.length) state.kind = "validation";
    let drawn = 0; // counts calls of `load`: only the newest may change the page
    let leave = () => {}; // ends what an open group has under way

    const steps = () => dumps[state.kind].steps;
    const newest = () => steps()[steps().length - 1];
    const step = () => (state.step === undefined ? newest() : Number(state.step));
    const isDefault = (name) => (state[name] ?? "") === "" || state[name] === DEFAULTS[name] || (name === "page" && !state.page);
    /** The state as parameters of an address: without defaults. */
    const shown = (names) => Object.fromEntries(names.map((name) => [name, isDefault(name) ? undefined : state[name]]));
    const remember = () => context.set({ ...shown(["kind", "step", "view", "sort", "order", ...FILTERS, "page", "group", "row"]) });

    function change(more) {
      Object.assign(state, { page: 0, group: undefined, row: undefined }, more);
      remember();
      load();
    }
    function goTo(index) {
      const place = Math.max(0, Math.min(index, steps().length - 1));
      change({ step: steps()[place] });
    }
    /** Position of the last step that is not after the wanted one. */
    function placeOf(wanted) {
      const after = steps().findIndex((each) => each > wanted);
      return after < 0 ? steps().length - 1 : Math.max(0, after - 1);
    }

    // The controls.
    const choice = (label, name, options, more = {}) => {
      const select = el("select", { name, onchange: () => change({ [name]: select.value, ...more }) });
      select.fill = (entries) => {
        select.replaceChildren(...Object.entries(entries).map(([value, text]) => el("option", { value, selected: value === (state[name] ?? "") }, text)));
      };
      select.fill(options);
      return { select, label: el("label", {}, `${label} `, select) };
    };
    const field = (label, name, width) => {
      const input = el("input", { name, inputMode: "decimal", value: state[name] ?? "", size: width, "aria-label": label, placeholder: label });
      input.addEventListener("change", () => change({ [name]: input.value.trim() }));
      return input;
    };
    const kind = choice("Samples of", "kind", KINDS, { step: undefined });
    const view = choice("Show", "view", { groups: "prompts", rows: "responses" });
    const sort = choice("Sort by", "sort", SORTS);
    const order = choice("Order", "order", { desc: "highest first", asc: "lowest first" });
    const stop = choice("Stop reason", "stop", { "": "any" });
    const variance = choice("Scores of a group", "variance", { "": "any", nonzero: "differ", zero: "all equal" });
    const problem = choice("Problem", "problem", { "": "any or none", tool_error: "tool error", reward_failed: "reward failed" });
    const text = el("input", { type: "search", name: "text", value: state.text ?? "", size: 24, maxLength: 500, "aria-label": "Text in prompt, answer or messages", placeholder: "text to search for" });
    const stepInput = el("input", { type: "number", min: 0, "aria-label": "Step", onchange: () => steps().length && goTo(placeOf(Number(stepInput.value))) });
    const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step by slider", onchange: () => goTo(Number(slider.value)) });
    slider.addEventListener("input", () => (stepInput.value = steps()[Number(slider.value)]));
    const button = (label, title, action, name) => el("button", { type: "button", "aria-label": name, title, onclick: action }, label);
    const previous = button("◀", "Previous step", () => goTo(placeOf(step()) - 1), "Previous step");
    const next = button("▶", "Next step", () => goTo(placeOf(step()) + 1), "Next step");
    const last = button("Newest", "Newest step, and follow the run", () => change({ step: undefined }));
    const following = el("span", { class: "muted", role: "status" });
    const reset = button("Clear filters", "Clear filters", () => {
      for (const control of filters.querySelectorAll("input, select")) control.value = "";
      closeResults();
      change({ ...Object.fromEntries(FILTERS.map((name) => [name, undefined])) });
    });
    const searchAll = button("Search all steps", "Search the text in all steps, newest first", () => searchSteps(text.value.trim()));
    const filters = el(
      "form",
      { class: "controls", onsubmit: (event) => (event.preventDefault(), change({ text: text.value.trim() })) },
      stop.label,
      variance.label,
      problem.label,
      el("span", { role: "group", "aria-label": "Reward" }, "Reward ", field("reward from", "min_score", 9), " – ", field("reward to", "max_score", 9)),
      el("span", { role: "group", "aria-label": "Length" }, "Tokens ", field("tokens from", "min_length", 9), " – ", field("tokens to", "max_length", 9)),
      el("span", { role: "search" }, text, " ", el("button", { type: "submit" }, "Search this step"), " ", searchAll),
      reset,
    );
    const facts = el("p", { class: "facts", role: "status" });
    const list = el("div", { class: "scroll list" });
    const pager = el("div", { class: "controls" });
    const found = el("section", { "aria-label": "Results in all steps", hidden: true });
    main.append(
      el("div", { class: "controls" }, kind.label, el("span", { role: "group", "aria-label": "Step" }, previous, " Step ", stepInput, " ", next, " ", last), slider, following),
      el("div", { class: "controls" }, view.label, sort.label, order.label),
      el("details", { open: matchMedia("(min-width: 700px)").matches || FILTERS.some((name) => state[name]) }, el("summary", {}, "Filters and search"), filters),
      found,
      facts,
      list,
      pager,
    );

    function drawControls() {
      const place = steps().length ? placeOf(step()) : 0;
      slider.max = Math.max(0, steps().length - 1);
      slider.value = place;
      slider.disabled = steps().length < 2;
      stepInput.value = step() ?? "";
      slider.setAttribute("aria-valuetext", `step ${step()}`);
      previous.disabled = place === 0;
      next.disabled = place >= steps().length - 1;
      kind.select.fill(Object.fromEntries(Object.entries(KINDS).map(([name, title]) => [name, `${title} (${count(dumps[name].steps.length, "step")})`])));
      sort.select.value = state.sort;
      view.select.value = state.view;
      order.select.value = state.order;
      order.select.disabled = state.sort === "file";
      following.textContent = state.step !== undefined ? (step() < newest() ? `newest is ${newest()}` : "") : steps().length ? "follows the run" : "";
    }

    async function load() {
      const own = ++drawn;
      leave();
      drawControls();
      if (!steps().length) {
        facts.textContent = dumps[state.kind].why;
        list.replaceChildren();
        pager.replaceChildren();
        return;
      }
      list.setAttribute("aria-busy", "true");
      let answer;
      try {
        answer = await api("/api/rollouts", { run: context.run, kind: state.kind, step: step(), ...shown(["view", "sort", "order", ...FILTERS, "page"]) });
      } catch (error) {
        if (own !== drawn) return;
        list.replaceChildren(Lockstep.problem(error));
        facts.textContent = "";
        pager.replaceChildren();
        return;
      } finally {
        if (own === drawn) list.removeAttribute("aria-busy");
      }
      if (own !== drawn) return;
      drawFacts(answer);
      const { low, high } = answer.summary.stats ?? {};
      list.replaceChildren(state.view === "rows" ? rowTable(answer, low, high) : groupTable(answer, low, high));
      drawPager(answer);
      if (state.group !== undefined || state.row !== undefined) openNamed(low, high);
    }

    function drawFacts({ summary, total }) {
      const { stats, stops } = summary;
      stop.select.fill({ "": "any", ...Object.fromEntries(Object.entries(stops).map(([name, responses]) => [name, `${name} (${number(responses)})`])) });
      if (state.stop && !(state.stop in stops)) stop.select.append(el("option", { value: state.stop, selected: true }, `${state.stop} (0)`));
      for (const option of sort.select.options) option.disabled = (option.value === "advantage" && !summary.has_advantage) || (["turns", "tool_errors"].includes(option.value) && !summary.has_turns);
      const parts = [`Step ${step()}: ${count(summary.num_groups, "prompt")}, ${count(stats?.n ?? 0, "response")}`];
      if (stats) parts.push(`reward ${number(stats.mean)} (${number(stats.low)} to ${number(stats.high)})`, `${percent(stats.pass_rate)} passed`, `${whole(stats.length)} tokens on average`);
      if (summary.num_several) parts.push(`${number(summary.num_equal)} of ${count(summary.num_several, "group")} with equal scores`);
      if (stats?.cut) parts.push(`${percent(stats.cut)} cut at the maximum length`);
      if (summary.num_tool_errors) parts.push(`${number(summary.num_tool_errors)} with tool errors`);
      if (summary.num_reward_failed) parts.push(`scoring failed for ${count(summary.num_reward_failed, "response")}`);
      if (summary.damaged) parts.push(`${count(summary.damaged, "damaged line")} left out`);
      if (isFiltered()) parts.push(`${count(total, state.view === "rows" ? "response" : "prompt")} ${total === 1 ? "matches" : "match"}`);
      facts.replaceChildren(`${parts.join(", ")}.`);
    }

    const whole = (value) => number(value === null ? null : Math.round(value));
    const percent = (share) => (share === null || share === undefined ? "–" : `${number(100 * share, 3)} %`);
    const head = (...names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));
    /** A score as a square: the fuller, the higher in this step. matches: it is outlined, as one that the filters want. */
    function square(score, low, high, matches = false) {
      const share = score === null ? 0 : high > low ? (score - low) / (high - low) : 1;
      const mark = matches ? el("span", { class: "unseen" }, " (matches)") : null;
      return el("span", { class: `square ${matches ? "match" : ""}`, title: matches ? "matches the filters" : null, style: `--share: ${Math.round(60 * share)}%` }, score === null ? "?" : number(score, 3), mark);
    }
    const isFiltered = () => FILTERS.some((name) => state[name]);
    function toggle(title, target, low, high) {
      const opener = el("button", { type: "button", class: "opener", "aria-expanded": "false", title: "Show the responses side by side" }, title || "(empty prompt)");
      opener.addEventListener("click", () => {
        const isOpen = opener.getAttribute("aria-expanded") === "true";
        Object.assign(state, { group: isOpen ? undefined : target.group, row: undefined });
        if (!isOpen) state.step = step(); // a group is one of a step: the address names it
        remember();
        leave();
        if (!isOpen) open(opener, { group: target.group }, low, high);
      });
      opener.dataset.group = target.group;
      return opener;
    }

    function groupTable({ items, summary }, low, high) {
      const rows = items.map((item) =>
        el(
          "tr",
          {},
          el("td", {}, item.group),
          el("td", { class: "wide" }, toggle(item.prompt, item, low, high)),
          el("td", { class: "squares" }, item.scores.map((score, place) => square(score, low, high, isFiltered() && item.matches[place])), item.stats.n > item.scores.length ? ` +${number(item.stats.n - item.scores.length)}` : null),
          summary.has_acc ? el("td", {}, percent(item.stats.pass_rate)) : null,
          el("td", {}, number(item.stats.mean, 3)),
          el("td", {}, number(item.stats.std, 3)),
          el("td", {}, whole(item.stats.length)),
          el("td", {}, percent(item.stats.cut)),
        ),
      );
      const table = el("table", {}, el("caption", { class: "muted" }, `Prompts of the step; choose one to see its responses side by side.${isFiltered() ? " Scores of the responses that match are outlined." : ""}`), head("#", "Prompt", "Scores", ...(summary.has_acc ? ["Passed"] : []), "Mean", "Spread", "Tokens", "Cut"));
      return rows.length ? (table.append(el("tbody", {}, rows)), table) : nothing(summary);
    }
    function rowTable({ items, summary }, low, high) {
      const rows = items.map((item) =>
        el(
          "tr",
          {},
          el("td", {}, item.row),
          el("td", { class: "wide" }, toggle(item.prompt, item, low, high)),
          el("td", { class: "wide" }, item.beginning ?? "(long: open it)"),
          el("td", {}, square(item.score, low, high)),
          summary.has_acc ? el("td", {}, passed(item)) : null,
          el("td", {}, number(item.advantage, 3)),
          el("td", {}, number(item.length)),
          el("td", {}, ending(item)),
          el("td", {}, number(item.turns), item.tool_errors ? ` (${count(item.tool_errors, "tool error")})` : null),
          el("td", {}, conversation(item.row)),
        ),
      );
      const table = el("table", {}, el("caption", { class: "muted" }, "Responses of the step."), head("Row", "Prompt", "Answer", "Score", ...(summary.has_acc ? ["Passed"] : []), "Advantage", "Tokens", "Stop", "Turns", "Conversation"));
      return rows.length ? (table.append(el("tbody", {}, rows)), table) : nothing(summary);
    }
    const nothing = (summary) => el("p", {}, summary.num_groups ? "Nothing matches: clear a filter." : "This step's file has no rows.");
    const passed = (row) => (row.passed ? "✓ passed" : "✗ not");
    const ending = (row) => [{ length: "cut at the maximum length", stop: "stopped" }[row.finish_reason] ?? row.finish_reason ?? "–", row.reward_failed ? ", scoring failed" : ""].join("");
    /** With the list's own parameters, for the way back and for the next response that matches. */
    const conversation = (row) => {
      const list = Object.entries(shown(["view", "sort", "order", ...FILTERS, "page"])).filter(([, value]) => value !== undefined);
      const params = new URLSearchParams({ run: context.run, kind: state.kind, step: step(), row, ...Object.fromEntries(list) });
      return el("a", { href: `#/conversation?${params}`, "aria-label": `Open conversation of row ${row}` }, "Open conversation");
    };

    function drawPager({ total, page, per_page: size }) {
      const pages = Math.ceil(total / size);
      const turn = (to) => {
        Object.assign(state, { page: to, group: undefined, row: undefined });
        remember();
        load();
      };
      pager.replaceChildren();
      if (pages < 2) return;
      pager.append(
        el("button", { type: "button", disabled: page === 0, onclick: () => turn(page - 1) }, "Previous page"),
        `Page ${number(page + 1)} of ${number(pages)}`,
        el("button", { type: "button", disabled: page >= pages - 1, onclick: () => turn(page + 1) }, "Next page"),
      );
    }

    // An open group.
    /** Opens the group that the address names; if it is not on this page of the list, above it. */
    function openNamed(low, high) {
      const wanted = state.row !== undefined ? { row: state.row } : { group: state.group };
      const opener = state.row === undefined ? [...list.querySelectorAll(".opener")].find((each) => each.dataset.group === String(state.group)) : null;
      open(opener, wanted, low, high);
    }
    function open(opener, wanted, low, high) {
      const body = el("div", { class: "group" }, "…");
      const holder = opener ? el("tr", {}, el("td", { colspan: 10 }, body)) : body;
      if (opener) opener.closest("tr").after(holder);
      else list.prepend(holder);
      if (opener) opener.setAttribute("aria-expanded", "true");
      let isOpen = true;
      const ends = [];
      leave = () => {
        isOpen = false;
        for (const end of ends) end();
        holder.remove();
        if (opener) opener.setAttribute("aria-expanded", "false");
        leave = () => {};
      };
      const close = leave;
      showGroup(body, wanted, low, high, ends, () => isOpen).catch((error) => isOpen && body.replaceChildren(Lockstep.problem(error)));
      if (!opener) {
        body.before(el("button", { type: "button", class: "close", onclick: (event) => (event.target.remove(), close(), Object.assign(state, { group: undefined, row: undefined }), remember()) }, "Close group"));
        ends.push(() => list.querySelector(".close")?.remove());
      }
    }
    async function showGroup(body, wanted, low, high, ends, isOpen, page = 0) {
      const at = { run: context.run, kind: state.kind, step: step(), ...wanted };
      const group = await api("/api/group", { ...at, page: page || undefined });
      if (!isOpen()) return;
      const pages = Math.ceil(group.stats.n / group.per_page);
      const turn = (to) => showGroup(body, wanted, low, high, ends, isOpen, to).catch((error) => isOpen() && body.replaceChildren(Lockstep.problem(error)));
      const fact = (name, value) => (value ? [el("dt", {}, name), el("dd", {}, value)] : null);
      const story = el("section", { "aria-label": "This prompt over the steps" });
      body.replaceChildren(
        el("h2", {}, `Group ${group.group} of step ${group.step}`),
        el("pre", { class: "text", tabindex: 0, "aria-label": "Prompt" }, cutText(group.prompt)),
        el("dl", {}, fact("Expected answer", cutText(group.expected)), fact("Data source", group.data_source), fact("Row of the data", group.index)),
        el("div", { class: "responses", role: "region", tabindex: 0, "aria-label": "Responses side by side" }, group.responses.map((each, place) => responseOf(each, page * group.per_page + place + 1, low, high))),
        el(
          "div",
          { class: "controls", hidden: pages < 2 },
          el("button", { type: "button", disabled: page === 0, onclick: () => turn(page - 1) }, "Previous responses"),
          `Responses ${page * group.per_page + 1} to ${page * group.per_page + group.responses.length} of ${number(group.stats.n)}`,
          el("button", { type: "button", disabled: page >= pages - 1, onclick: () => turn(page + 1) }, "Next responses"),
        ),
        story,
      );
      showHistory(story, group.key, ends, isOpen);
    }
    function cutText(text) {
      if (!text.text) return null;
      return text.left_out ? [text.text, el("span", { class: "muted" }, ` [… ${number(text.left_out)} characters left out …] `), text.end] : text.text;
    }
    function responseOf(response, place, low, high) {
      const facts = [count(response.length, "token"), ending(response)];
      if (response.advantage !== null) facts.unshift(`advantage ${number(response.advantage, 3)}`);
      if (response.turns !== null) facts.push(count(response.turns, "turn"));
      const value = (each) => (typeof each === "number" ? number(each) : String(each));
      const named = (title, values) =>
        Object.keys(values).length ? [el("h4", {}, title), el("dl", { "aria-label": title }, Object.entries(values).map(([name, each]) => [el("dt", {}, name), el("dd", {}, value(each))]))] : null;
      return el(
        "article",
        { "aria-label": `Response ${place}` },
        el("h3", {}, `Response ${place} `, square(response.score, low, high)),
        el("p", {}, facts.join(" · ")),
        el("pre", { class: "text", tabindex: 0, "aria-label": `Answer ${place}` }, response.output ? (cutText(response.output) ?? "(empty)") : `(${number(response.num_bytes)} bytes: not read here)`),
        named("Output of the reward function", response.extras),
        named("Counts and rewards of the conversation", response.counts),
        el("p", {}, conversation(response.row)),
      );
    }

    /** The prompt's pass rate and mean score over the steps; asks again while the index is being made. */
    async function showHistory(story, key, ends, isOpen) {
      const figure = el("div", { class: "chart history" });
      const note = el("p", { class: "muted", role: "status" });
      const table = el("details", {}, el("summary", {}, "As a table"));
      story.replaceChildren(el("h3", {}, "This prompt over the steps"), note, figure, table);
      let timer = null;
      let isDrawn = false;
      ends.push(() => {
        clearTimeout(timer);
        if (isDrawn) Lockstep.purge(figure);
      });
      const openStep = (place, history) => change({ step: history.step[place], group: history.group[place] });
      async function draw() {
        let history;
        try {
          history = await api("/api/prompt", { run: context.run, kind: state.kind, key });
        } catch (error) {
          note.textContent = String(error.message);
          return;
        }
        if (!isOpen() || !story.isConnected) return;
        const isComplete = history.num_indexed >= history.num_steps;
        const indexed = isComplete ? `of ${number(history.num_steps)}` : `so far: ${number(history.num_indexed)} of ${count(history.num_steps, "step")} indexed`;
        note.textContent = `Seen in ${count(history.num_seen, "step")} ${indexed}. A response passes if the reward function's acc, or without it the score, is above 0.5.`;
        if (!isComplete && !window.RECORDED) timer = setTimeout(draw, 2000);
        figure.hidden = table.hidden = !history.step.length;
        if (!history.step.length) return;
        const trace = (name, values, more) => ({ x: history.step, y: values, name, mode: "lines+markers", marker: { size: 6 }, ...more });
        await chart(figure, [trace("pass rate", history.pass_rate), trace("mean score", history.mean, { marker: { size: 11, symbol: "circle-open" }, line: { dash: "dot" } })], { height: 220, margin: { l: 48, r: 12, t: 8, b: 36 }, xaxis: { title: { text: "step" } } });
        if (!isDrawn) figure.on("plotly_click", (event) => openStep(event.points[0].pointIndex, figure.history));
        isDrawn = true;
        figure.history = history;
        const from = Math.max(0, history.step.length - 100);
        const rows = history.step.slice(from).map((each, place) =>
          el(
            "tr",
            {},
            el("td", {}, el("button", { type: "button", onclick: () => openStep(from + place, history) }, `Step ${each}`)),
            [percent(history.pass_rate[from + place]), number(history.mean[from + place], 3), number(history.std[from + place], 3), whole(history.length[from + place]), percent(history.cut[from + place]), number(history.n[from + place])].map((cell) => el("td", {}, cell)),
          ),
        );
        const isTableOpen = table.querySelector("table") !== null && table.open;
        table.replaceChildren(
          el("summary", {}, from ? "As a table (the last 100)" : "As a table"),
          el("table", {}, head("Step", "Passed", "Mean", "Spread", "Tokens", "Cut", "Responses"), el("tbody", {}, rows.reverse())),
        );
        table.open = isTableOpen;
      }
      await draw();
    }

    // Search in all steps.
    let searched = 0;
    function closeResults() {
      searched += 1;
      found.hidden = true;
    }
    function searchSteps(wanted) {
      const own = ++searched;
      found.hidden = false;
      if (!wanted) {
        found.replaceChildren(el("p", { role: "status" }, "Type a text to search for."));
        text.focus();
        return;
      }
      const { kind } = state;
      const other = kind === "train" ? "validation" : "train";
      const note = el("p", { role: "status" });
      const rows = el("tbody");
      const more = el("button", { type: "button" }, "Search on");
      const stopper = el("button", { type: "button", onclick: closeResults }, "Close results");
      found.replaceChildren(
        el("h2", {}, `“${wanted}” in all steps of ${KINDS[kind]}`),
        note,
        el("div", { class: "scroll results", tabindex: 0, role: "region", "aria-label": "Hits" }, el("table", {}, head("Step", "Score", "In", "Text"), rows)),
        el("div", { class: "controls" }, more, stopper),
      );
      let numFound = 0;
      async function go(cursor) {
        more.hidden = true;
        const before = numFound;
        while (cursor !== null && numFound < before + 50) {
          let answer;
          try {
            answer = await api("/api/search", { run: context.run, kind, text: wanted, ...cursor });
          } catch (error) {
            note.textContent = String(error.message);
            return;
          }
          if (own !== searched || !found.isConnected) return;
          numFound += answer.hits.length;
          rows.append(...answer.hits.map((hit) => hitRow(hit, kind)));
          note.textContent =
            `${number(numFound)} found; searched ${number(answer.num_steps - answer.num_left)} of ${count(answer.num_steps, "step")} of ${KINDS[kind]}${answer.next ? "" : ", all of them"}.` +
            (dumps[other].steps.length ? ` Samples of ${KINDS[other]} are searched separately.` : "");
          cursor = answer.next;
        }
        more.hidden = cursor === null;
        more.onclick = () => go(cursor);
      }
      go({});
    }
    function hitRow(hit, kind) {
      return el(
        "tr",
        {},
        el("td", {}, el("button", { type: "button", onclick: () => change({ kind, step: hit.step, row: hit.row }) }, `Step ${hit.step}, row ${hit.row}`)),
        el("td", {}, number(hit.score, 3)),
        el("td", {}, hit.column),
        el("td", { class: "wide" }, hit.excerpt),
      );
    }

    // Live: follow the newest step, but leave a group that is being read where it is.
    let isAsking = false;
    context.onChange(async (changed) => {
      if (changed.run !== context.run || isAsking) return;
      isAsking = true;
      const before = step();
      try {
        dumps = await api("/api/dumps", { run: context.run });
      } catch {
        return; // the next change asks again
      } finally {
        isAsking = false;
      }
      const isReading = state.group !== undefined || state.row !== undefined;
      if (state.step === undefined && isReading && before !== undefined) {
        state.step = before;
        remember();
      }
      if (step() !== before) load();
      else drawControls();
    });
    await load();
    return () => {
      drawn += 1;
      searched += 1;
      leave();
    };
  },
});
