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
  let isShown = false; // whether a panel is there, and not an error or the words that there is no run

  function address() {
    const [, panel = "", query = ""] = location.hash.match(/^#\/([^?]*)\??(.*)$/) || [];
    return { panel, params: Object.fromEntries(new URLSearchParams(query)) };
  }

  /** The address of a panel; parameters that are undefined, null or "" are left out. */
  function hash(panel, params) {
    const kept = Object.entries(params).filter(([, value]) => (value ?? "") !== "");
    return `#/${panel}?${new URLSearchParams(kept)}`;
  }

  function go(panel, params) {
    location.hash = hash(panel, params);
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

  function showTabs(panel, run) {
    if (!window.RECORDED) document.title = `${panel.title}: ${run} – Lockstep`;
    if (!tabs.children.length) tabs.append(...Lockstep.panels.filter((each) => !each.within).map((each) => el("a", { id: `tab-${each.id}` }, each.title)));
    for (const each of Lockstep.panels.filter((each) => !each.within)) {
      const tab = document.getElementById(`tab-${each.id}`);
      tab.href = `#/${each.id}?${new URLSearchParams({ run })}`;
      if (each === panel || each.id === panel.within) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
  }

  /** Leave the panel that is shown, and put something in its place. */
  function replace(element) {
    if (leave) leave();
    leave = null;
    isShown = false;
    listeners.clear();
    statusListeners.clear();
    main.replaceChildren(element);
  }

  async function show() {
    const own = ++shown;
    const { panel: id, params } = address();
    const panel = Lockstep.panels.find((each) => each.id === id) || Lockstep.panels[0];
    let found;
    try {
      found = await listRuns();
    } catch (error) {
      if (own === shown) replace(Lockstep.problem(error));
      return;
    }
    if (own !== shown) return;
    if (!found.length) {
      replace(el("p", {}, "No runs yet: this page shows them when they begin."));
      return;
    }
    const run = params.run || found[0].name;
    if (!found.some((each) => each.name === run)) {
      replace(el("p", { class: "problem", role: "alert" }, `There is no run “${run}” (any more): choose one above.`));
      runs.selectedIndex = -1;
      return;
    }
    runs.value = run;
    showTabs(panel, run);
    const element = el("div", { class: "panel", id: panel.id });
    replace(element);
    isShown = true;
    const context = {
      run,
      runs: found,
      params,
      // what a panel does after it was left has no effect
      go: (to, more = {}) => own === shown && go(to, { run, ...more }),
      /** Build the panel again. */
      reload: () => own === shown && show(),
      /** Change parameters of the address without building the panel again; those that are undefined, null or "" are removed. */
      set: (more) => {
        if (own !== shown) return;
        context.params = { ...context.params, ...more };
        history.replaceState(null, "", hash(panel.id, { ...address().params, ...more }));
      },
      /** Called with {run, step} when a run has changed. */
      onChange: (listener) => own === shown && listeners.add(listener),
      /** Called with {run, state} when a run has written a new status.json: about once per second. */
      onStatus: (listener) => own === shown && statusListeners.add(listener),
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
    events.onopen = () => {
      live.textContent = "connected";
      if (!isShown && live.dataset.failed) show(); // the server is back
      delete live.dataset.failed;
    };
    events.onerror = () => {
      live.textContent = "not connected";
      live.dataset.failed = "yes";
    };
    events.onmessage = (event) => {
      const change = JSON.parse(event.data);
      for (const listener of listeners) listener(change);
      const isKnown = [...runs.options].some((option) => option.value === change.run);
      if (!isKnown && change.step !== null) (isShown ? listRuns() : show()).catch(() => null);
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
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is ours
    main.focus();
  });
  window.addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
  listen();
})();
