"use strict";
// One response: its turns, its rewards, and its tokens coloured by their numbers. Opened from the rollouts.

(() => {
  const { el, api, number, count, visible } = Lockstep;

  const LOG_PROB = [-0.1, -0.5, -1, -2, -4, -8];
  /** How tokens are coloured: `of` is a name in the answer's numbers; `at` where levels begin; `signed` two colours around 0. */
  const COLOURS = [
    { id: "log-prob", title: "log-prob by the rollout", of: "rollout_log_probs", at: LOG_PROB, falling: true },
    { id: "trainer", title: "log-prob by the trainer", of: "old_log_probs", at: LOG_PROB, falling: true },
    { id: "reference", title: "log-prob by the reference", of: "ref_log_prob", at: LOG_PROB, falling: true },
    { id: "entropy", title: "entropy", of: "entropys", at: [0.1, 0.25, 0.5, 1, 2, 4] },
    { id: "advantage", title: "advantage", of: "advantages", signed: true },
    { id: "gap", title: "trainer-rollout gap", of: "gap", at: [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.5], absolute: true },
    { id: "value", title: "value by the critic", of: "values", signed: true },
    { id: "reward", title: "reward", of: "token_level_rewards", signed: true },
    { id: "mask", title: "trained on or not" },
    { id: "version", title: "policy version" },
  ];
  /** What the line of details says about a token. */
  const DETAILS = [
    ["rollout_log_probs", "log-prob"],
    ["old_log_probs", "trainer"],
    ["gap", "gap"],
    ["ref_log_prob", "reference"],
    ["entropys", "entropy"],
    ["advantages", "advantage"],
    ["values", "value"],
    ["token_level_rewards", "reward"],
    ["rollout_is_weights", "importance weight"],
  ];

  /** As the server counts them: an emoji is one, and not two units of UTF-16. */
  const characters = (text) => [...text];

  /** A text of the run, of which the middle may have to be fetched. */
  function textBlock(cut, fetchPage) {
    const block = el("pre", { class: "text", tabIndex: cut.length > 2000 ? 0 : -1 });
    block.append(visible(cut.text));
    const tail = cut.tail || "";
    const tailLength = characters(tail).length;
    let shown = characters(cut.text).length;
    if (shown + tailLength >= cut.length) {
      block.append(visible(tail));
      return block;
    }
    const label = () => `… ${number(cut.length - tailLength - shown)} of ${number(cut.length)} characters are left out: show more …`;
    const more = el("button", { type: "button" }, label());
    const failed = el("span", { class: "problem", role: "status" });
    more.addEventListener("click", async () => {
      more.disabled = true;
      try {
        const page = await fetchPage(cut.place, shown);
        const text = characters(page.text).slice(0, cut.length - tailLength - shown);
        shown += text.length;
        more.before(visible(text.join("")));
        if (!text.length || shown + tailLength >= cut.length) more.remove();
        else more.textContent = label();
      } catch (error) {
        failed.textContent = ` ${error.message}`;
      }
      more.disabled = false;
    });
    block.append(more, failed, visible(tail));
    return block;
  }

  function imageBlock(place, alt, fetchImage) {
    const image = el("img", { alt });
    fetchImage(place).then(
      (answer) => (image.src = answer.uri),
      (error) => image.replaceWith(Lockstep.problem(error)),
    );
    return image;
  }

  function turnBlock(turn, fetchPage, fetchImage) {
    const title = [visible(turn.role), turn.name ? ` ${visible(turn.name)}` : ""].join("");
    const parts = turn.parts.map((part) => {
      if (part.text) return textBlock(part.text, fetchPage);
      if (part.note) return el("p", { class: "muted" }, visible(part.note));
      return imageBlock(part.image, `image of the ${turn.role} turn`, fetchImage);
    });
    const calls = turn.calls.map((call) =>
      el("div", { class: "call" }, el("strong", {}, `calls ${visible(call.name)}`), textBlock(call.arguments, fetchPage)),
    );
    return el(
      "section",
      { class: `turn ${turn.role === "assistant" ? "policy" : ""}`, "aria-label": `turn of ${turn.role}` },
      el(
        "h4",
        {},
        title,
        turn.failed ? el("span", { class: "mark bad" }, "failed") : null,
        turn.reward !== null && turn.reward !== undefined ? el("span", { class: "mark" }, `reward ${number(turn.reward)}`) : null,
      ),
      parts,
      calls,
    );
  }

  function facts(data) {
    const cut = data.finish_reason === "length" ? "cut at the maximum length" : data.finish_reason;
    const rows = [
      ["score", `${data.odd_score || number(data.score)}${data.reward_failed ? " (scoring failed)" : ""}`],
      ["advantage", number(data.advantage)],
      ["length", data.length === null ? "–" : count(data.length, "token")],
      ["finished by", visible(cut || "–")],
      ["data source", visible(data.data_source || "–")],
      ["row of the data", number(data.index)],
    ];
    return el("dl", { class: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  function extrasTable(extras, fetchPage) {
    const row = (extra) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, visible(extra.name)),
        el("td", {}, extra.text ? textBlock(extra.text, fetchPage) : number(extra.value)),
      );
    return el("table", { class: "extras" }, el("tbody", {}, ...extras.map(row)));
  }

  /** Links to the other responses of the group and of the step. */
  function neighbours(data, context) {
    const to = (row, label) => {
      const open = () => context.go("conversation", { ...context.params, row });
      return el("button", { type: "button", disabled: row === null, onclick: open }, label);
    };
    return el(
      "div",
      { class: "controls" },
      el("button", { type: "button", onclick: () => back(context) }, "All rollouts of the step"),
      to(data.group_neighbours[0], "Previous of the group"),
      to(data.group_neighbours[1], "Next of the group"),
      to(data.step_neighbours[0], "Previous of the step"),
      to(data.step_neighbours[1], "Next of the step"),
      data.num_matching < data.rows ? el("span", { class: "muted" }, `of the ${count(data.num_matching, "response")} that match the filters`) : null,
    );
  }

  /** The list as it was left. */
  function back(context) {
    const { row, colour, token, ...list } = context.params;
    context.go("rollouts", list);
  }

  /** The level of a value from 0 (no colour) to 6, and whether it is below 0. */
  function levelOf(colour, value, range) {
    if (value === null || value === undefined) return { level: 0 };
    if (colour.signed) {
      const most = Math.max(Math.abs(range[0]), Math.abs(range[1]));
      return { level: most ? Math.ceil((6 * Math.abs(value)) / most) : 0, below: value < 0 };
    }
    const size = colour.falling ? -value : colour.absolute ? Math.abs(value) : value;
    return { level: colour.at.filter((edge) => size >= Math.abs(edge)).length };
  }

  function classOf(colour, page, place) {
    const trained = page.mask[place] ? "" : " untrained";
    if (colour.id === "mask") return `token${trained}${page.mask[place] ? " cold3" : ""}`;
    if (colour.id === "version") {
      const version = page.versions[place];
      const age = version < 0 ? 0 : 1 + ((page.version_range[1] - version) % 6);
      return `token${trained}${age ? ` hot${age}` : ""}`;
    }
    const values = page.numbers[colour.of];
    const { level, below } = levelOf(colour, values[place], page.ranges[colour.of] || [0, 0]);
    return `token${trained}${level ? ` ${colour.signed && !below ? "cold" : "hot"}${level}` : ""}`;
  }

  function legendOf(colour, page) {
    const swatch = (name, label) => el("li", {}, el("span", { class: `token ${name}`, "aria-hidden": "true" }, "abc"), label);
    if (colour.id === "mask") return [swatch("cold3", "trained on"), swatch("untrained", "not trained on: tool results, user turns, rejected tokens")];
    if (colour.id === "version") {
      const range = page.version_range;
      if (!range) return [el("li", {}, "the policy wrote none of the tokens")];
      const ages = Array.from({ length: Math.min(6, range[1] - range[0] + 1) }, (_, age) => age);
      return ages.map((age) => swatch(`hot${age + 1}`, `version ${range[1] - age}${range[1] - range[0] >= 6 ? ", or 6 older, ..." : ""}`));
    }
    const range = page.ranges[colour.of];
    if (!range) return [el("li", {}, "no token has this number")];
    const span = el("li", {}, `from ${number(range[0])} to ${number(range[1])}`);
    if (colour.signed) {
      const most = Math.max(Math.abs(range[0]), Math.abs(range[1]));
      if (!most) return [span];
      const marks = [-1, -0.5, 0.5, 1].filter((mark) => (mark < 0 ? range[0] < 0 : range[1] > 0));
      return [span, ...marks.map((mark) => swatch(`${mark < 0 ? "hot" : "cold"}${Math.abs(6 * mark)}`, number(mark * most, 3)))];
    }
    const sign = colour.falling ? "below" : colour.absolute ? "±" : "from";
    return [span, ...colour.at.map((edge, place) => swatch(`hot${place + 1}`, `${sign} ${edge}`))];
  }

  /** A piece as it is shown: spaces and line breaks visible, parts of a character as bytes. */
  function shownPiece(piece) {
    if (typeof piece !== "string") return `⟨${piece.hex.toUpperCase()}⟩`;
    if (piece === "") return "⟨empty⟩";
    return visible(piece).replace(/[\u200c\u200d]/g, (char) => (char === "\u200c" ? "⟨ZWNJ⟩" : "⟨ZWJ⟩")).replace(/ /g, "·").replace(/\t/g, "→\t").replace(/\n/g, "⏎\n");
  }

  function saidOf(piece) {
    if (typeof piece !== "string") return `bytes ${piece.hex.toUpperCase()}${piece.of ? ` of ${JSON.stringify(piece.of)}` : ""}`;
    return visible(JSON.stringify(piece));
  }

  /** The tokens, a page of them at a time. One token is the current one; its numbers are in the line of details. */
  async function tokensSection(context, ask) {
    const section = el("section", { "aria-label": "Tokens" }, el("h3", {}, "Tokens"));
    let page;
    try {
      page = await api("/api/tokens", ask);
    } catch (error) {
      section.append(el("p", { class: "muted", role: "status" }, error.message));
      return section;
    }
    if (!page.num_tokens) {
      section.append(el("p", { class: "muted" }, "The response has no tokens."));
      return section;
    }
    const has = (colour) => !colour.of || page.numbers[colour.of];
    const usable = COLOURS.filter(has);
    let colour = usable.find((each) => each.id === context.params.colour) || usable[0];
    let current = 0; // number of the current token in the response
    const select = el("select", {}, ...usable.map((each) => el("option", { value: each.id, selected: each === colour }, each.title)));
    const legend = el("ul", { class: "legend", "aria-label": "Legend" });
    const details = el("p", { class: "details", role: "status", "aria-live": "polite" });
    const list = el("div", { class: "tokens", role: "listbox", tabIndex: 0, "aria-label": "Tokens of the response, arrow keys select one" });
    const where = el("span", { role: "status" });
    const problem = el("p", { class: "problem", role: "alert" });
    const size = page.ids.length;

    function paint() {
      [...list.children].forEach((token, place) => (token.className = classOf(colour, page, place) + (page.begin + place === current ? " current" : "")));
      legend.replaceChildren(...legendOf(colour, page));
    }

    function draw() {
      list.replaceChildren(
        ...page.pieces.map((piece, place) => el("span", { role: "option", id: `token-${page.begin + place}`, "aria-selected": "false" }, shownPiece(piece))),
      );
      const last = page.begin + page.ids.length;
      where.textContent = `tokens ${number(page.begin + 1)} to ${number(last)} of ${number(page.num_tokens)}, ${number(page.num_trained)} trained on`;
      previous.hidden = next.hidden = page.num_tokens <= size;
      previous.disabled = page.begin === 0;
      next.disabled = last >= page.num_tokens;
      paint();
    }

    function choose(token) {
      const before = list.children[current - page.begin];
      if (before) {
        before.classList.remove("current");
        before.setAttribute("aria-selected", "false");
      }
      current = token;
      const place = token - page.begin;
      const element = list.children[place];
      if (!element) return;
      element.classList.add("current");
      element.setAttribute("aria-selected", "true");
      list.setAttribute("aria-activedescendant", element.id);
      details.textContent = describe(place);
    }

    function describe(place) {
      const version = page.versions[place];
      const parts = [`token ${number(page.begin + place + 1)}: ${saidOf(page.pieces[place])}`, `id ${page.ids[place]}`];
      for (const [name, title] of DETAILS) {
        const value = page.numbers[name] ? page.numbers[name][place] : null;
        if (value !== null) parts.push(`${title} ${number(value)}${name === "rollout_log_probs" ? ` (${number(100 * Math.exp(value), 3)} %)` : ""}`);
      }
      parts.push(version < 0 ? "not written by the policy" : `policy version ${version}`, page.mask[place] ? "trained on" : "not trained on");
      return parts.join(" | ");
    }

    async function open(token) {
      const begin = size * Math.floor(token / size);
      if (begin !== page.begin) {
        try {
          page = await api("/api/tokens", begin ? { ...ask, begin } : ask);
          problem.textContent = "";
        } catch (error) {
          problem.textContent = error.message;
          return;
        }
        draw();
      }
      choose(token);
      list.children[token - page.begin].scrollIntoView({ block: "nearest" });
    }

    const button = (label, action, disabled) => el("button", { type: "button", disabled, onclick: action }, label);
    const previous = button("Previous page", () => open(page.begin - size));
    const next = button("Next page", () => open(page.begin + size));
    const jumps = [
      button("Least likely token", () => open(page.least_likely), page.least_likely === null),
      button("Largest gap", () => open(page.largest_gap), page.largest_gap === null),
      page.turns.length > 1 ? button("Next turn", () => open((page.turns.find(([begin]) => begin > current) || page.turns[0])[0])) : null,
    ];
    const placeOf = (element) => (element.parentNode === list ? Number(element.id.replace("token-", "")) - page.begin : -1);
    let pointer = "";
    section.addEventListener("mousemove", (event) => {
      const at = `${event.clientX} ${event.clientY}`;
      if (at === pointer) return; // the tokens moved, not the mouse
      pointer = at;
      const place = placeOf(event.target);
      if (place >= 0) details.textContent = describe(place);
    });
    list.addEventListener("mouseleave", () => choose(current));
    list.addEventListener("click", (event) => {
      const place = placeOf(event.target);
      if (place >= 0) choose(page.begin + place);
    });
    list.addEventListener("keydown", (event) => {
      const last = page.num_tokens - 1;
      const to = { ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, PageDown: current + 100, PageUp: current - 100, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(Math.max(0, Math.min(last, to)));
    });
    select.addEventListener("change", () => {
      colour = usable.find((each) => each.id === select.value);
      context.set({ colour: colour.id });
      paint();
    });
    const reasons = Object.entries(page.missing).map(([name, reason]) => {
      const known = COLOURS.find((each) => each.of === name);
      return el("li", {}, `No ${known ? known.title : name}: ${reason}.`);
    });
    section.append(
      el("div", { class: "controls" }, el("label", {}, "Colour by ", select), ...jumps.filter(Boolean)),
      legend,
      details,
      problem,
      list,
      el("div", { class: "controls" }, previous, next, where),
      el("ul", { class: "muted", hidden: !reasons.length }, ...reasons),
      promptTokens(ask),
    );
    draw();
    await open(Math.max(0, Math.min(page.num_tokens - 1, Number(context.params.token) || 0)));
    return section;
  }

  /** The prompt's tokens, which are fetched when they are asked for. */
  function promptTokens(ask) {
    const list = el("div", { class: "tokens" });
    const box = el("details", {}, el("summary", {}, "Tokens of the prompt"), list);
    box.addEventListener("toggle", async () => {
      if (!box.open || list.childElementCount) return;
      try {
        const page = await api("/api/tokens", { ...ask, of: "prompt" });
        list.replaceChildren(...page.pieces.map((piece) => el("span", { class: "token untrained" }, shownPiece(piece))));
        if (page.ids.length < page.num_tokens) list.append(` … the first ${number(page.ids.length)} of ${number(page.num_tokens)}`);
      } catch (error) {
        list.replaceChildren(Lockstep.problem(error));
      }
    });
    return box;
  }

  Lockstep.panel({
    id: "conversation",
    title: "Conversation",
    within: "rollouts",
    async show(main, context) {
      const { kind = "train", step, row } = context.params;
      if (step === undefined || row === undefined) {
        main.append(el("p", {}, "Choose a response in the rollouts."));
        return;
      }
      const ask = { run: context.run, kind, step, row };
      const filters = Object.fromEntries(Lockstep.rolloutFilters.map((name) => [name, context.params[name]]));
      const data = await api("/api/conversation", { ...ask, ...filters });
      const fetchPage = (place, begin) => api("/api/conversation/text", { ...ask, place: JSON.stringify(place), begin: begin || undefined });
      const fetchImage = (place) => api("/api/conversation/image", { ...ask, place: JSON.stringify(place) });
      const group = data.group_size > 1 ? `, ${data.group_place + 1} of ${number(data.group_size)} responses to its prompt` : "";
      main.append(
        el("h2", {}, `${kind === "validation" ? "Validation at step" : "Step"} ${number(data.step ?? Number(step))}, response ${number(data.row + 1)} of ${number(data.rows)}${group}`),
        neighbours(data, context),
        facts(data),
        el("section", { class: "turn", "aria-label": "prompt" }, el("h4", {}, "prompt"), data.images.map((place) => imageBlock(place, "image of the prompt", fetchImage)), textBlock(data.prompt, fetchPage)),
        ...data.turns.map((turn) => turnBlock(turn, fetchPage, fetchImage)),
        data.num_turns > data.turns.length ? el("p", { class: "muted" }, `The first ${data.turns.length} of ${number(data.num_turns)} turns are shown.`) : "",
        data.expected ? el("section", { class: "turn", "aria-label": "expected answer" }, el("h4", {}, "expected"), textBlock(data.expected, fetchPage)) : "",
        el("h3", {}, "The reward function's output"),
        data.extras.length ? extrasTable(data.extras, fetchPage) : el("p", { class: "muted" }, "The reward function returned nothing besides the score."),
        ...(data.counts.length ? [el("h3", {}, "Counts and rewards of the conversation"), extrasTable(data.counts, fetchPage)] : []),
      );
      main.append(await tokensSection(context, ask));
    },
  });
})();
