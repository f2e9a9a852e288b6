"use strict";
// The shell: which run and panel are shown is in the address, as #/PANEL?run=NAME&...

(() => {
  const { el, api } = Lockstep;
  const main = document.getElementById("main");
  const tabs = document.getElementById("tabs");
  const runs = document.getElementById("run");
  const live = document.getElementById("live");
  const listeners = new Set();
  const statusListeners = new Set();
  let leave = null;
  let shown = 0; // counts calls of `show`: only the newest may change the page

  function address() {
    const [, panel = "", query = ""] = location.hash.match(/^#\/([^?]*)\??(.*)$/) || [];
    return { panel, params: Object.fromEntries(new URLSearchParams(query)) };
  }

  function go(panel, params) {
    location.hash = `#/${panel}?${new URLSearchParams(params)}`;
  }

  function runLabel(name, state) {
    return state && state !== "unknown" ? `${name} (${state})` : name;
  }

  async function listRuns() {
    const found = await api("/api/runs");
    const chosen = address().params.run;
    runs.replaceChildren(
      ...found.map((run) => el("option", { value: run.name, selected: run.name === chosen }, runLabel(run.name, run.state))),
    );
    return found;
  }

  async function show() {
    const own = ++shown;
    const { panel: id, params } = address();
    const panel = Lockstep.panels.find((each) => each.id === id) || Lockstep.panels[0];
    let found;
    try {
      found = await listRuns();
    } catch (error) {
      main.replaceChildren(Lockstep.problem(error));
      return;
    }
    if (own !== shown) return;
    if (!found.length) {
      main.replaceChildren(el("p", {}, "No runs yet: this page shows them when they begin."));
      return;
    }
    const run = params.run || found[0].name;
    runs.value = run;
    tabs.replaceChildren(
      ...Lockstep.panels
        .filter((each) => !each.within)
        .map((each) => {
          const isShown = each === panel || each.id === panel.within;
          return el("a", { href: `#/${each.id}?${new URLSearchParams({ run })}`, "aria-current": isShown ? "page" : null }, each.title);
        }),
    );
    if (leave) leave();
    leave = null;
    listeners.clear();
    statusListeners.clear();
    const element = el("div", { class: "panel", id: panel.id });
    main.replaceChildren(element);
    const context = {
      run,
      runs: found,
      params,
      go: (to, more = {}) => go(to, { run, ...more }),
      /** Change parameters, also those of the address, without building the panel again; those that are undefined, null or "" are removed. */
      set: (more) => {
        const kept = Object.entries({ ...address().params, ...more }).filter(([, value]) => (value ?? "") !== "");
        context.params = Object.fromEntries(kept);
        history.replaceState(null, "", `#/${panel.id}?${new URLSearchParams(kept)}`);
      },
      /** Called with {run, step} when a run has changed. */
      onChange: (listener) => listeners.add(listener),
      /** Called with {run, state} when a run has written a new status.json: about once per second. */
      onStatus: (listener) => statusListeners.add(listener),
    };
    try {
      const end = (await panel.show(element, context)) || null;
      if (own === shown) leave = end;
      else if (end) end();
    } catch (error) {
      element.replaceChildren(Lockstep.problem(error));
    }
  }

  function listen() {
    if (window.RECORDED) return;
    const events = new EventSource("api/events");
    events.onopen = () => (live.textContent = "live");
    events.onerror = () => (live.textContent = "not connected");
    events.onmessage = (event) => {
      const change = JSON.parse(event.data);
      for (const listener of listeners) listener(change);
      if (![...runs.options].some((option) => option.value === change.run)) show();
    };
    events.addEventListener("status", (event) => {
      const change = JSON.parse(event.data);
      const option = [...runs.options].find((each) => each.value === change.run);
      if (option) option.textContent = runLabel(change.run, change.state);
      for (const listener of statusListeners) listener(change);
    });
  }

  // The token is in a cookie now: it need not stay in the address and the history.
  if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);
  runs.addEventListener("change", () => go(address().panel || Lockstep.panels[0].id, { run: runs.value }));
  window.addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
  listen();
})();
