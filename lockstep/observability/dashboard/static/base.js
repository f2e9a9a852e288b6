"use strict";
// What all panels use. Text of runs enters the page only through text nodes and attributes set by `el`: never as markup.

const Lockstep = {
  panels: [],
  /** panel: {id, title, show(element, context)}; `show` may return a function that is called when the panel is left.
   *  within: the panel that it is opened from, if it has no tab of its own. */
  panel(panel) {
    this.panels.push(panel);
  },

  /** Parameters of the address that filter the responses of a step. */
  rolloutFilters: ["stop", "min_score", "max_score", "min_length", "max_length", "variance", "problem", "text"],

  /** An element: el("a", {href: "#", class: "x", onclick: f}, "text", child, ...). Null children are left out. */
  el(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name in element && name !== "list") element[name === "class" ? "className" : name] = value;
      else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  },

  /** The JSON of an API path. In an exported page the answers are in `window.RECORDED`. Throws an Error with the server's words. */
  async api(path, params = {}, options = {}) {
    const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== undefined && value !== null));
    const url = query.size ? `${path}?${query}` : path;
    if (window.RECORDED) {
      if (url in window.RECORDED) return window.RECORDED[url];
      throw new Error("not part of this exported page");
    }
    let response;
    try {
      response = await fetch(url.slice(1), options);
    } catch {
      throw new Error("the dashboard does not answer: has it been stopped?");
    }
    const data = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
    if (!response.ok) throw new Error(data.error || response.statusText);
    return data;
  },

  /** Show an error in place of a panel's content. */
  problem(error) {
    return this.el("p", { class: "problem", role: "alert" }, String(error.message || error));
  },

  /** Our own words, with `code` in backticks. */
  prose(text) {
    return text.split("`").map((part, index) => (index % 2 ? this.el("code", {}, part) : part));
  },

  number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Number(value.toPrecision(digits)).toString();
  },

  /** A number of things: "1 step", "2 steps", "– steps". */
  count(value, one, several = `${one}s`) {
    return `${Lockstep.number(value)} ${value === 1 ? one : several}`;
  },

  duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    const minutes = Math.round(seconds / 60);
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  },

  /** Text of a run with everything visible that would hide or reorder what is beside it: control and format characters, bidirectional marks. */
  visible(text) {
    return text.replace(/[^\P{C}\n\t\u200c\u200d]|[\u2028\u2029]/gu, (char) => {
      return `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
    });
  },

  /** Text for plotly, which reads a few tags: none of ours are meant. */
  plain(text) {
    return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  },

  /** Resolved when plotly is there. It is large: the page is built without waiting for it. */
  plotly: new Promise((resolve, reject) => {
    if (window.Plotly) return resolve();
    const script = document.getElementById("plotly");
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("the charts' script could not be loaded: reload the page")));
  }),

  /** A plotly chart with the page's colours. traces, layout: plotly's. */
  async chart(element, traces, layout = {}) {
    try {
      await Lockstep.plotly;
    } catch (error) {
      element.replaceChildren(Lockstep.problem(error));
      return;
    }
    if (!element.isConnected) return; // its panel was left meanwhile
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
    const base = {
      margin: { l: 56, r: 12, t: 32, b: 40 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
      legend: { orientation: "h", y: -0.2 },
      hovermode: "x unified",
    };
    const merged = { ...base, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
    return Plotly.react(element, traces, merged, { displayModeBar: false, responsive: true });
  },

  /** Free what a chart holds, when its panel is left. */
  purge(element) {
    if (window.Plotly) Plotly.purge(element);
  },
};
