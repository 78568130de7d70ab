// Chat: each answer is a job, so it survives a reload, a cut connection and the loss of its worker.

import { ADDRESS, api, tellFreshness } from "./api.js";
import { milliseconds, plural, rate, seconds } from "./format.js";
import { LANES, act, badge, draw, fromCode, h, heading, say, select } from "./parts.js";
import { ENDED, Growing, follow, keepEndInView, markAttempt } from "./stream.js";

const KEPT = "penstock-console-chat"; // of this tab: a reload keeps it, closing the tab does not
const GAP_PX = 16; // between the last line and the form
const SILENT_S = 3; // after the last token, before the page says so
const SAID = { completed: "Answer complete.", failed: "The answer failed.", cancelled: "Answer stopped.", expired: "The answer came too late." };

export function chat({ root, signal, title, who }) {
  title("Chat");
  const kept = { turns: [], model: "", lane: "interactive", deadline: "", most: "256", ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };
  const turns = h("div", { class: "turns", key: "turns", owned: true, role: "log", "aria-live": "off", "aria-label": "Conversation" });
  const ask = h("div", { class: "asking", key: "asking", owned: true });
  const talk = h("div", { class: "talk", key: "talk", owned: true }, turns, ask);
  const fold = () => Math.min(ask.getBoundingClientRect().top, visualViewport.offsetTop + visualViewport.height); // a phone's keyboard may cover the form
  const showEnd = keepEndInView(document, talk, () => (turns.lastChild?.getBoundingClientRect().bottom ?? 0) + GAP_PX - fold(), signal);
  let models = [], busy = null;
  const keep = () => sessionStorage.setItem(KEPT, JSON.stringify(kept));
  const show = () => {
    draw(ask, form());
    draw(root, heading("Chat", h("button", { type: "button", class: "small", onclick: clear, disabled: !kept.turns.length }, "New conversation")), choices(), talk, code(kept));
  };
  show();
  if (!kept.turns.length) hint();
  for (const turn of kept.turns) turn.role === "user" ? asked(turn) : answer(turn);
  tellFreshness("live", Date.now() / 1000);
  api.get("/v1/models", { signal }).then((found) => {
    models = found.data.map(({ id }) => id);
    if (!models.includes(kept.model)) kept.model = models[0] ?? "";
    show();
  }, (error) => say(error.message, true));

  function hint() {
    turns.append(h("div", { class: "empty" }, h("p", { class: "strong" }, "Ask something."),
      h("p", {}, "While the answer comes, reload the page, cut the connection, or kill the worker: it goes on.")));
  }

  function clear() {
    kept.turns = [];
    busy = null; // its answer goes on as a job
    keep();
    turns.replaceChildren();
    hint();
    show();
  }

  async function send(event) {
    event.preventDefault();
    const field = event.target.elements.text, text = field.value.trim();
    if (!text || busy) return;
    if (!kept.turns.length) turns.replaceChildren();
    const messages = [...kept.turns.filter((turn) => turn.text), { role: "user", text }].map(({ role, text: content }) => ({ role, content }));
    const body = { model: kept.model, messages, max_tokens: Number(kept.most), queue: { priority: kept.lane, on_disconnect: "continue", ...(kept.deadline && { deadline_ms: 1000 * Number(kept.deadline) }) } };
    const made = await act(() => api.post("/v1/jobs", body));
    if (!made) return;
    field.value = "";
    kept.turns.push({ role: "user", text }, { role: "assistant", job: made.id, text: "", state: "" });
    keep();
    asked(kept.turns.at(-2));
    answer(kept.turns.at(-1), true);
    showEnd();
  }

  function asked(turn) {
    turns.append(h("div", { class: "turn user" }, h("p", { class: "label" }, "You"), h("div", { class: "text" }, turn.text)));
  }

  /** Shows an answer and follows it from its first event, whether it has begun, or ended. Its times are taken here only
   *  if it was sent from this page: after a reload all events come at once. At its end the server's pace replaces it. */
  function answer(turn, sent = false) {
    const text = h("div", { class: "text", "aria-busy": "true" }), line = h("p", { class: "meta" });
    turns.append(h("div", { class: "turn assistant" }, h("p", { class: "label" }, kept.model || "Answer"), text, line));
    const growing = new Growing(text), run = { tokens: 0, first: 0, last: 0, worker: "", wait: "", link: "", silent: 0, live: !turn.state, sent };
    const cut = follow(turn.job, {
      event: (name, data) => { take(name, data, turn, growing, run); tell(); },
      lost: () => { run.link = "connection lost, reading on…"; tell(); },
      again: () => { run.link = "reconnected, nothing lost"; growing.mark("reconnected"); tell(); },
    }, signal);
    if (run.live) { busy = { turn, cut }; show(); say("Answering."); }
    const clock = run.live && setInterval(() => { run.silent = run.last ? (performance.now() - run.last) / 1000 : 0; tell(); }, 1000);
    signal.addEventListener("abort", () => clearInterval(clock));
    tell();

    function tell() {
      if (turn.state) {
        clearInterval(clock);
        text.removeAttribute("aria-busy");
        if (busy?.turn === turn) { busy = null; keep(); show(); say(SAID[turn.state]); }
        if (!turn.timed) { turn.timed = true; time(turn).then(tell, () => null); }
      }
      draw(line, turn.state ? badge(turn.state) : badge(run.worker ? "in_progress" : "queued"),
        run.worker ? h("span", {}, run.worker) : h("span", {}, run.wait),
        h("span", { title: "From the request to the first token that a reader could see, whichever worker gave it" }, `first token ${milliseconds(turn.ttft ?? null)}`),
        h("span", {}, `${rate(turn.pace ?? null)} tokens/s`), h("span", {}, plural(run.tokens, "token")),
        !turn.state && run.silent >= SILENT_S && h("span", { class: "warn-text" }, `no token for ${seconds(Math.floor(run.silent))}`),
        turn.cut && h("span", { class: "dim" }, "cut at its token limit"),
        run.link && h("span", { class: "warn-text" }, run.link), turn.error && h("span", { class: turn.state === "cancelled" ? "dim" : "bad-text" }, turn.error),
        h("a", { href: `/console/jobs/${turn.job}` }, "timeline"));
    }
  }

  function take(name, data, turn, growing, run) {
    if (name === "queued" || name === "queue.position") {
      run.wait = data.position === null || data.position === undefined ? "waiting" : `${plural(data.position, "job")} before it${data.eta_ms ? `, about ${milliseconds(data.eta_ms)}` : ""}`;
    } else if (name === "started") {
      markAttempt(growing, name, data);
      run.worker = data.worker;
    } else if (name === "interrupted") {
      markAttempt(growing, name, data);
      [run.worker, run.wait] = ["", "waits for a worker to continue"];
    } else if (name === "delta" && data.index === 0) {
      growing.add(data.text);
      turn.text = growing.text;
      run.silent = 0;
      run.tokens += data.tokens;
      run.last = performance.now();
      run.first ||= run.last;
      if (run.sent && turn.ttft === undefined) { turn.ttft = null; time(turn).catch(() => {}); } // asked again at the end
      if (run.sent && run.last - run.first > 200) turn.pace = (1000 * (run.tokens - 1)) / (run.last - run.first);
    } else if (name === "stream.reset") {
      growing.clear();
      growing.mark("the answer begins again here", { pending: true });
      run.tokens = 0;
    } else if (ENDED.has(name) || name === "error") {
      turn.state = name === "error" ? "failed" : name;
      if (!growing.text && turn.text) growing.add(turn.text); // the server no longer has it
      turn.text = growing.text;
      growing.flush(); // a complete answer shows all of its text at once
      turn.error = data.cancelled_by === "owner" ? "stopped" : data.error?.message ?? "";
      turn.cut = (data.finish_reasons ?? []).includes("length");
      run.link = "";
    }
  }

  function choices() {
    const change = (name) => (value) => { kept[name] = value; keep(); show(); };
    return h("div", { class: "filters" },
      select("model", "Model", models.map((name) => [name, name]), kept.model, change("model")),
      select("lane", "Lane", LANES.slice(LANES.indexOf(who.highest_lane)).map((name) => [name, name]), kept.lane, change("lane")),
      select("deadline", "Deadline", [["", "none"], ["5", "5 s"], ["30", "30 s"], ["300", "5 min"]], kept.deadline, change("deadline")),
      select("most", "At most", [["64", "64 tokens"], ["256", "256 tokens"], ["1024", "1,024 tokens"]], kept.most, change("most")));
  }

  async function time(turn) {
    const found = await api.get(`/v1/jobs/${turn.job}/timing`, { signal });
    turn.ttft = found.time_to_first_token_ms;
    if (turn.state) turn.pace = found.time_per_output_token_ms ? 1000 / found.time_per_output_token_ms : null;
    keep();
  }

  function form() {
    return h("form", { class: "card ask", key: "ask", onsubmit: send },
      h("label", { class: "field grow" }, h("span", {}, "Message"),
        h("textarea", { name: "text", rows: 2, onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); event.target.form.requestSubmit(); } } })),
      h("div", { class: "actions" },
        busy && h("button", { type: "button", onclick: () => busy.cut() }, "Cut connection"),
        busy && h("button", { type: "button", class: "danger", onclick: () => act(() => api.post(`/v1/jobs/${busy.turn.job}/cancel`)) }, "Stop"),
        h("button", { class: "primary", type: "submit", disabled: !!busy }, "Send")));
  }
}

function code(kept) {
  const body = { model: kept.model || "MODEL", stream: true, messages: [{ role: "user", content: "…" }] };
  return fromCode(["Terminal", 'penstock chat "…"'],
    ["curl", `curl -N -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' ${ADDRESS}/v1/chat/completions -d '${JSON.stringify(body)}'`],
    ["Python", `from openai import OpenAI\n\nclient = OpenAI(base_url="${ADDRESS}/v1", api_key=KEY)\nclient.chat.completions.create(model="${body.model}", messages=[{"role": "user", "content": "…"}])`]);
}
