"use strict";
// Talk to a checkpoint: the dashboard serves one at a time, and passes messages on to it.

(() => {
  if (window.RECORDED) return; // an exported page has no server
  const { el, api } = Lockstep;
  const conversations = new Map(); // of each run: [{question, answers: [{label, text, end, error}]}]

  const settings = { Temperature: 1, "Top-p": 1, "Max tokens": 256, system: "", device: null }; // kept while other panels are shown
  const ENDS = {
    stop: "stop: the model ended its answer",
    length: "length: cut at the limit of tokens",
    tool_calls: "tool_calls: ended with a tool call, which is not run here",
    stopped: "stopped by you",
  };

  const post = (path, body) =>
    api(path, {}, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

  Lockstep.panel({
    id: "talk",
    title: "Talk",
    async show(main, context) {
      const run = context.run;
      const first = await api("/api/talk", { run });
      if (!first.checkpoints.length) {
        main.append(
          el("h2", {}, "Talk to a checkpoint"),
          el("p", {}, "This run has no checkpoint yet: trainer.save_freq says after how many steps one is saved."),
        );
        context.onChange(async (change) => {
          if (change.run === run && (await api("/api/talk", { run })).checkpoints.length) context.reload();
        });
        return null;
      }
      if (!conversations.has(run)) conversations.set(run, []);
      const turns = conversations.get(run);
      let server = first.server;
      let timer = 0;
      let isLeft = false;
      let answering = null; // an AbortController while an answer is streamed

      const checkpoint = el("select", {});
      const preferred = settings.device ?? (server ? server.device : first.device);
      const device = el(
        "select",
        {},
        el("option", { value: "cpu", selected: preferred === "cpu" }, "CPU"),
        el("option", { value: "auto", selected: preferred === "auto" }, "GPU if there is one"),
      );
      const load = el("button", { type: "button", onclick: start }, "Load");
      const unload = el("button", { type: "button", onclick: stop }, "Unload");
      const state = el("p", { role: "status" });
      const log = el("pre", { class: "log", tabIndex: 0, "aria-label": "Last lines of the server" });
      const temperature = setting("Temperature", 0, 5, 0.1);
      const topP = setting("Top-p", 0.01, 1, 0.01);
      const maxTokens = setting("Max tokens", 1, 32768, 1);
      const wrong = el("p", { class: "problem", role: "alert" });
      const system = el("textarea", { rows: 2, "aria-label": "System message", value: settings.system });
      system.addEventListener("input", () => (settings.system = system.value));
      const transcript = el("div", { class: "transcript", role: "log", "aria-label": "Conversation", "aria-live": "polite" });
      const message = el("textarea", { rows: 3, id: "message", placeholder: "Enter to send, Shift+Enter for a new line" });
      const send = el("button", { type: "submit" }, "Send");
      const halt = el("button", { type: "button", onclick: () => answering && answering.abort() }, "Stop");
      const repeat = el("button", { type: "button", onclick: () => areSettingsRight() && ask(turns[turns.length - 1]) }, "Ask again");
      const clear = el("button", { type: "button", onclick: empty }, "New conversation");
      const form = el(
        "form",
        { onsubmit: submit },
        el("label", { htmlFor: "message" }, "Message"),
        message,
        el("div", { class: "controls" }, send, halt, repeat, clear),
      );
      main.append(
        el("h2", {}, "Talk to a checkpoint"),
        el("div", { class: "controls" }, el("label", {}, "Checkpoint ", checkpoint), el("label", {}, "Device ", device), load, unload),
        state,
        log,
        el("div", { class: "controls" }, temperature.label, topP.label, maxTokens.label),
        wrong,
        el("details", { open: Boolean(settings.system) }, el("summary", {}, "System message"), system),
        transcript,
        form,
        el(
          "p",
          { class: "muted" },
          "“Ask again” puts another answer beside the last one: to compare two checkpoints, load the other one first. ",
          "One checkpoint is in memory at a time, with low priority. ",
          "Tools and environments are not run here: a conversation ends at a tool call.",
        ),
      );

      function setting(name, min, max, step) {
        const input = el("input", { type: "number", min, max, step, value: settings[name], class: "setting" });
        input.addEventListener("input", () => (settings[name] = input.value));
        return { name, input, min, max, isWhole: step === 1, label: el("label", {}, `${name} `, input) };
      }

      /** Says what is wrong with the first setting that is. */
      function areSettingsRight() {
        const bad = [temperature, topP, maxTokens].find(({ input, min, max, isWhole }) => {
          const value = input.valueAsNumber;
          return !(value >= min && value <= max) || (isWhole && !Number.isInteger(value));
        });
        wrong.textContent = bad ? `${bad.name} must be a ${bad.isWhole ? "whole " : ""}number from ${bad.min} to ${bad.max}.` : "";
        if (bad) bad.input.focus();
        return !bad;
      }

      function list(names) {
        const chosen = checkpoint.value || context.params.checkpoint || (server && server.run === run ? server.checkpoint : names[0]);
        checkpoint.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
      }

      function update() {
        const ready = server && server.state === "ready";
        const loading = server && server.state === "loading";
        const name = server ? `${server.checkpoint} of ${server.run}` : "";
        state.className = server && server.state === "failed" ? "problem" : "";
        state.textContent = !server
          ? `Nothing is loaded.${first.training ? " A run is training: the CPU is chosen, so that its GPU memory stays its own." : ""}`
          : ready
            ? `${name} is loaded (${server.device === "cpu" ? "CPU" : "GPU if there is one"}).`
            : loading
              ? `Loading ${name} …`
              : `${name} could not be served: ${server.problem}. The last lines say why:`;
        log.hidden = !server || ready || !server.log.length;
        log.textContent = server ? server.log.join("\n") : "";
        unload.disabled = !server;
        const current = server && server.run === run && server.checkpoint === checkpoint.value && server.device === device.value;
        load.disabled = Boolean(current && server.state !== "failed");
        send.disabled = !ready || Boolean(answering);
        repeat.disabled = !ready || Boolean(answering) || !turns.length;
        halt.disabled = !answering;
        clear.disabled = Boolean(answering) || !turns.length;
        clearTimeout(timer);
        if (isLeft) return;
        if (loading || ready) timer = setTimeout(poll, loading ? 700 : 5000);
      }

      async function poll() {
        try {
          server = (await api("/api/talk", { run })).server;
        } catch (error) {
          state.textContent = error.message;
          if (!isLeft) timer = setTimeout(poll, 5000);
          return;
        }
        update();
      }

      async function start() {
        load.disabled = true;
        state.className = "";
        state.textContent = `Loading ${checkpoint.value} …`;
        context.set({ checkpoint: checkpoint.value });
        await change("/api/talk/start", { run, checkpoint: checkpoint.value, device: device.value });
      }

      async function stop() {
        if (answering) answering.abort();
        await change("/api/talk/stop", {});
      }

      async function change(path, body) {
        try {
          server = (await post(path, body)).server;
          update();
        } catch (error) {
          server = await api("/api/talk", { run }).then((data) => data.server, () => null);
          update();
          state.className = "problem";
          state.textContent = error.message;
        }
      }

      function empty() {
        turns.length = 0;
        draw();
        update();
        message.focus();
      }

      function draw() {
        transcript.replaceChildren(...turns.map(drawTurn));
      }

      function drawTurn(turn) {
        return el(
          "article",
          {},
          el("div", { class: "question" }, el("h3", {}, "You"), el("div", { class: "words" }, turn.question)),
          el("div", { class: "answers" }, ...turn.answers.map((answer) => drawAnswer(answer))),
        );
      }

      function drawAnswer(answer) {
        answer.words = el("div", { class: "words" }, answer.text);
        answer.note = el("p", { class: answer.error ? "problem" : "muted" }, noteOf(answer));
        return el("div", { class: "answer" }, el("h3", {}, answer.label), answer.words, answer.note);
      }

      function noteOf(answer) {
        return answer.error ?? ENDS[answer.end] ?? answer.end ?? "";
      }

      function submit(event) {
        event.preventDefault();
        const question = message.value;
        if (!question.trim() || send.disabled || !areSettingsRight()) return;
        const turn = { question, answers: [] };
        turns.push(turn);
        message.value = "";
        transcript.append(drawTurn(turn));
        ask(turn);
      }

      async function ask(turn) {
        const own = new AbortController();
        answering = own;
        update();
        const history = turns
          .slice(0, turns.indexOf(turn))
          .flatMap((each) => [
            { role: "user", content: each.question },
            { role: "assistant", content: each.answers.length ? each.answers[each.answers.length - 1].text : "" },
          ]);
        const messages = [
          ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
          ...history,
          { role: "user", content: turn.question },
        ];
        const sampling = `temperature ${temperature.input.value}, top-p ${topP.input.value}`;
        const answer = { label: `${server.checkpoint}${server.run === run ? "" : ` of ${server.run}`}, ${sampling}`, text: "", end: null, error: null };
        turn.answers.push(answer);
        const place = transcript.children[turns.indexOf(turn)].lastChild;
        place.append(drawAnswer(answer));
        try {
          const response = await fetch("api/talk/chat", {
            method: "POST",
            headers: { "content-type": "application/json" },
            signal: own.signal,
            body: JSON.stringify({
              messages,
              temperature: temperature.input.valueAsNumber,
              top_p: topP.input.valueAsNumber,
              max_tokens: maxTokens.input.valueAsNumber,
            }),
          });
          if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error || response.statusText);
          await read(response.body.getReader(), answer);
          if (!answer.end && !answer.error) answer.error = "the answer ended early";
        } catch (error) {
          if (own.signal.aborted) answer.end = "stopped";
          else answer.error = String(error.message || error);
        }
        answer.note.className = answer.error ? "problem" : "muted";
        answer.note.textContent = noteOf(answer);
        if (answering === own) answering = null;
        if (main.isConnected) poll();
      }

      async function read(reader, answer) {
        const decoder = new TextDecoder();
        let rest = "";
        for (;;) {
          const { done, value } = await reader.read();
          if (done) return;
          rest += decoder.decode(value, { stream: true });
          const events = rest.split("\n\n");
          rest = events.pop();
          for (const event of events) {
            const data = JSON.parse(event.replace(/^data: /, ""));
            if (data.text) {
              answer.text += data.text;
              answer.words.textContent = answer.text;
            }
            if (data.end) answer.end = data.end;
            if (data.error) answer.error = data.error;
          }
        }
      }

      message.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      });
      checkpoint.addEventListener("change", update);
      device.addEventListener("change", () => {
        settings.device = device.value;
        update();
      });
      context.onChange(async (change) => {
        if (change.run === run) list((await api("/api/talk", { run })).checkpoints);
      });
      list(first.checkpoints);
      draw();
      update();
      return () => {
        isLeft = true;
        clearTimeout(timer);
        if (answering) answering.abort();
      };
    },
  });
})();
