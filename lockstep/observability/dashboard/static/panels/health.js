"use strict";
// What a run is doing now, and what is wrong with it.

(() => {
  const { el, api, chart, plain, number, duration, problem } = Lockstep;
  const STATES = {
    running: "running",
    finished: "finished",
    stopped: "stopped",
    failed: "failed",
    silent: "no sign of life",
    killed: "killed",
    unknown: "unknown",
  };
  const SEVERITIES = { bad: "Problem", warning: "Warning", info: "Note" };
  const HEALTH_INTERVAL_MS = 5000; // rules are asked for at most this often
  const ALIVE_INTERVAL_MS = 15000; // and this often if nothing changes: a run that stands still changes nothing

  const link = (panel, params) => `#/${panel}?${new URLSearchParams(params)}`;
  const has = (panel) => Lockstep.panels.some((each) => each.id === panel);

  function fact(name, value) {
    return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value));
  }

  function phase(row, now) {
    const seconds = row.began === null ? null : Math.max(0, now - row.began);
    const counted = row.total ? `${number(row.done)} of ${number(row.total)} ${row.unit}`.trim() : null;
    return el(
      "li",
      {},
      el("span", { class: "phase" }, row.name),
      row.total ? el("progress", { value: row.done, max: row.total, "aria-label": `${row.name}: ${counted}` }) : null,
      el("span", { class: "muted" }, [counted, duration(seconds)].filter(Boolean).join(", ")),
    );
  }

  function showStatus(section, status) {
    const now = Date.now() / 1000;
    const isRunning = status.state === "running";
    const step = number(status.step) + (status.total_steps ? ` of ${number(status.total_steps)}` : "");
    const age = status.time === null ? null : Math.max(0, now - status.time);
    const parts = [
      el("h2", {}, "Now"),
      el(
        "dl",
        { class: "facts" },
        fact("State", el("span", { class: `state ${status.state}` }, STATES[status.state] || status.state)),
        fact("Step", step),
        isRunning ? fact("Time left", status.seconds_left === null ? "not known yet" : `about ${duration(status.seconds_left)}`) : null,
        fact("Time per step", duration(status.step_seconds)),
        fact("Tokens per second and GPU", number(status.throughput)),
        fact("Last sign of life", age === null ? "–" : isRunning && age < 10 ? "just now" : `${duration(age)} ago`),
      ),
      status.total_steps
        ? el("progress", { class: "steps", value: status.step, max: status.total_steps, "aria-label": `step ${step}` })
        : null,
      isRunning && status.phases.length
        ? el("ul", { class: "phases", "aria-label": "Phases" }, ...status.phases.flat().map((row) => phase(row, now)))
        : null,
      isRunning && !status.phases.length ? el("p", { class: "muted" }, "between two phases") : null,
      status.state === "unknown" ? el("p", { class: "muted" }, "This run has written no status.json: it is of an older version, or has not begun.") : null,
    ];
    section.replaceChildren(...parts.filter(Boolean));
  }

  function evidence(finding, run) {
    const links = [];
    for (const metric of finding.metrics) {
      links.push(el("a", { href: link("curves", { run, metric }) }, metric));
    }
    if (finding.rollouts && has("rollouts")) {
      const step = finding.rollouts.step || (finding.rollouts.kind ? undefined : finding.steps && String(finding.steps[1]));
      links.push(el("a", { href: link("rollouts", { run, ...(step ? { step } : {}), ...finding.rollouts }) }, "the samples"));
    }
    return links.length ? el("p", {}, "Show evidence: ", ...links.flatMap((each, i) => (i ? [", ", each] : [each]))) : null;
  }

  /** A page of the docs: a link if the server has them, as a checkout does. */
  function docs(page, isServed) {
    const text = `docs/${page}`;
    return isServed ? el("a", { href: text, target: "_blank", rel: "noopener" }, text) : el("code", {}, text);
  }

  function showFindings(section, found, run, hasDocs) {
    const words = JSON.stringify(found);
    if (section.dataset.shown === words) return; // focus and selection stay
    section.dataset.shown = words;
    const none = el("p", {}, "No problems found. ", docs("metrics.md#what-to-watch", hasDocs), " says what to watch.");
    section.replaceChildren(
      el("h2", {}, found.length ? `Findings (${found.length})` : "Findings"),
      found.length
        ? el(
            "ul",
            { class: "findings" },
            ...found.map((finding) =>
              el(
                "li",
                { class: `finding ${finding.severity}` },
                el("h3", {}, el("span", { class: "severity" }, SEVERITIES[finding.severity]), " ", finding.title),
                el("p", {}, finding.text),
                evidence(finding, run),
                el("p", {}, el("strong", {}, "Try: "), Lockstep.prose(finding.advice)),
                el("p", { class: "muted" }, "More: ", docs(finding.docs, hasDocs)),
              ),
            ),
          )
        : none,
    );
  }

  function showCurves(section, curves, run) {
    const shown = new Map([...section.querySelectorAll("[data-metric]")].map((each) => [each.dataset.metric, each]));
    const figures = curves.map((curve) => {
      const known = shown.get(curve.metric);
      const figure = known || el("div", { class: "small-chart" });
      figure.dataset.metric = curve.metric;
      return figure;
    });
    if (figures.length !== shown.size || figures.some((figure) => !figure.isConnected)) {
      section.replaceChildren(
        ...curves.map((curve, i) =>
          el("figure", {}, el("figcaption", {}, el("a", { href: link("curves", { run, metric: curve.metric }) }, curve.title)), figures[i]),
        ),
      );
    }
    curves.forEach((curve, i) =>
      chart(figures[i], [{ x: curve.step, y: curve.value, mode: curve.step.length > 1 ? "lines" : "markers", name: plain(curve.title) }], {
        margin: { l: 44, r: 8, t: 4, b: 24 },
        showlegend: false,
        height: 150,
      }),
    );
  }

  Lockstep.panel({
    id: "health",
    title: "Health",
    async show(main, context) {
      const run = context.run;
      const now = el("section", { class: "now", "aria-label": "Now" });
      const curves = el("section", { class: "small-charts", "aria-label": "Main curves" });
      const findings = el("section", { "aria-label": "Findings" });
      main.append(el("div", { class: "health" }, now, curves, findings));
      let ended = false;
      let asked = 0;
      let waiting = null;

      async function drawStatus() {
        try {
          const status = await api("/api/status", { run });
          if (!ended) showStatus(now, status);
        } catch (error) {
          if (!ended) now.replaceChildren(problem(error));
        }
      }
      async function drawHealth() {
        waiting = null;
        asked = Date.now();
        try {
          const health = await api("/api/health", { run });
          if (ended) return;
          showCurves(curves, health.curves, run);
          showFindings(findings, health.findings, run, health.docs);
        } catch (error) {
          if (ended) return;
          findings.replaceChildren(problem(error));
          delete findings.dataset.shown;
        }
      }
      function soon() {
        if (waiting === null) waiting = setTimeout(drawHealth, Math.max(0, asked + HEALTH_INTERVAL_MS - Date.now()));
      }

      context.onStatus((change) => change.run === run && drawStatus());
      context.onChange((change) => {
        if (change.run !== run) return;
        drawStatus();
        soon();
      });
      const timer = window.RECORDED ? null : setInterval(() => (drawStatus(), soon()), ALIVE_INTERVAL_MS);
      await Promise.all([drawStatus(), drawHealth()]);
      return () => {
        ended = true;
        clearInterval(timer);
        clearTimeout(waiting);
        for (const figure of curves.querySelectorAll("[data-metric]")) Lockstep.purge(figure);
      };
    },
  });
})();
