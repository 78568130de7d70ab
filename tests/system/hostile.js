// Everything a page can try against another server. Reports, for each try, what it could read.
const chat = JSON.stringify({model: "sim", max_tokens: 4, messages: [{role: "user", content: "from a page"}]});
const found = {};
const soon = (ms) => new Promise((done) => setTimeout(done, ms));

async function attempt(name, work) {
  try {
    found[name] = (await Promise.race([work(), soon(5000).then(() => ({error: "timeout"}))])) ?? {};
  } catch (error) {
    found[name] = {error: String(error)};
  }
}

async function answer(response) {
  return {type: response.type, status: response.status, read: await response.text()};
}

function element(kind, url) {
  return new Promise((done) => {
    const it = document.createElement(kind);
    it.onload = () => done({loaded: true, read: kind === "iframe" ? framed(it) : ""});
    it.onerror = () => done({loaded: false});
    it.src = url;
    document.body.append(it);
  });
}

function framed(frame) {
  try {
    return frame.contentDocument ? frame.contentDocument.body.innerText : "";
  } catch {
    return "";
  }
}

function form(url, type, name, value) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.name = "f" + Math.random();
    document.body.append(frame);
    const it = document.createElement("form");
    Object.assign(it, {method: "POST", action: url, enctype: type, target: frame.name});
    const field = document.createElement("input");
    Object.assign(field, {name, value});
    it.append(field);
    document.body.append(it);
    frame.onload = () => done({loaded: true, read: framed(frame)});
    it.submit();
  });
}

function events(url) {
  return new Promise((done) => {
    const source = new EventSource(url);
    const got = [];
    const end = () => { source.close(); done({read: got.join("\n")}); };
    for (const kind of ["message", "queued", "started", "delta", "completed"]) {
      source.addEventListener(kind, (event) => { got.push(event.data); setTimeout(end, 300); });
    }
    source.onerror = () => setTimeout(end, 50);
  });
}

function socket(url) {
  return new Promise((done) => {
    const it = new WebSocket(url);
    it.onopen = () => done({read: "open"});
    it.onerror = () => done({});
  });
}

function xhr(url) {
  return new Promise((done) => {
    const it = new XMLHttpRequest();
    it.open("POST", url);
    it.setRequestHeader("Content-Type", "text/plain");
    it.onloadend = () => done({status: it.status, read: it.responseText});
    it.send(chat);
  });
}

async function tryAll(base, label) {
  const paths = ["/", "/v1/models", "/v1/jobs", "/v1/jobs/" + config.job, "/v1/jobs/" + config.job + "/result",
    "/admin/pools", "/metrics", "/healthz", "/openapi.json"];
  const posts = ["/v1/chat/completions", "/v1/jobs"];
  const work = [];
  const add = (name, doing) => work.push(attempt(label + " " + name, doing));
  for (const path of paths) {
    add("fetch cors " + path, async () => answer(await fetch(base + path)));
    add("fetch no-cors " + path, async () => answer(await fetch(base + path, {mode: "no-cors"})));
    add("script " + path, () => element("script", base + path));
    add("img " + path, () => element("img", base + path));
    add("iframe " + path, () => element("iframe", base + path));
  }
  await Promise.all(work);
  for (const path of posts) {
    for (const [kind, body] of [["text", chat], ["untyped", new Blob([chat])], ["binary", new TextEncoder().encode(chat)]]) {
      add("post cors " + kind + path, async () => answer(await fetch(base + path, {method: "POST", body})));
      add("post no-cors " + kind + path, async () => answer(await fetch(base + path, {method: "POST", mode: "no-cors", body})));
    }
    const typed = {method: "POST", body: chat, headers: {"Content-Type": "application/json"}};
    add("post json" + path, async () => answer(await fetch(base + path, typed)));
    add("post json no-cors" + path, async () => answer(await fetch(base + path, {...typed, mode: "no-cors"})));
    add("xhr" + path, () => xhr(base + path));
    add("beacon" + path, async () => ({sent: navigator.sendBeacon(base + path, chat)}));
    // A plain-text form whose one field makes a JSON body: {"model": ..., "x": "="}
    add("form text" + path, () => form(base + path, "text/plain", chat.slice(0, -1) + ', "user": "', '"}'));
    add("form" + path, () => form(base + path, "application/x-www-form-urlencoded", "a", "b"));
  }
  const put = {method: "PUT", body: '{"want": 1}', headers: {"Content-Type": "application/json"}};
  add("put", async () => answer(await fetch(base + "/admin/pools/sim", put)));
  add("put no type", async () => answer(await fetch(base + "/admin/pools/sim", {method: "PUT", body: new Blob(['{"want": 1}'])})));
  add("delete", async () => answer(await fetch(base + "/admin/pools/sim", {method: "DELETE"})));
  add("cancel", async () => answer(await fetch(base + "/v1/jobs/" + config.waiting + "/cancel", {method: "POST", mode: "no-cors"})));
  add("form cancel", () => form(base + "/v1/jobs/" + config.waiting + "/cancel", "text/plain", "a", "b"));
  const upload = new FormData();
  upload.append("purpose", "batch");
  upload.append("file", new Blob(['{"custom_id": "a"}\n']), "page.jsonl");
  add("upload", async () => answer(await fetch(base + "/v1/files", {method: "POST", mode: "no-cors", body: upload})));
  add("events", () => events(base + "/v1/jobs/" + config.job + "/events"));
  add("websocket", () => socket(base.replace("http", "ws") + "/v1/jobs"));
  await Promise.all(work);
}

(async () => {
  for (const base of config.bases) {
    await tryAll(base, base);
  }
  await fetch(config.report, {method: "POST", mode: "no-cors", body: JSON.stringify(found)});
  if (config.leave) {
    location = config.leave;  // the page itself becomes the server's answer
  }
})();
