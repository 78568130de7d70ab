// Jobs: a list in pages, filtered by the server; its address holds the filter.

import { ADDRESS, api, query, watch } from "./api.js";
import { count, plural, seconds } from "./format.js";
import { LANES, act, badge, confirmed, draw, empty, failed, fromCode, h, heading, jobLink, loading, modelLink, select, table, tenantLink, when } from "./parts.js";

const STATES = ["queued", "in_progress", "completed", "failed", "cancelled", "expired"];
const FILTERS = ["status", "lane", "model", "tenant", "since", "search"];
const TIMES = [["", "Any"], ["900", "Last 15 minutes"], ["3600", "Last hour"], ["86400", "Last day"], ["604800", "Last 7 days"]];
const OPEN = ["queued", "in_progress"];
const PAGE = 100, EVERY_MS = 3000, AT_ONCE = 8;

export function jobs({ root, signal, params, go, title, who }) {
  title("Jobs");
  const wanted = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  const cursor = params.get("cursor") ?? "";
  const asked = () => ({ ...wanted, since: wanted.since && String(Math.round(Date.now() / 1000 - Number(wanted.since))) });
  let choices = { models: [], tenants: [who.tenant] };
  const open = (change) => go(`/console/jobs${query({ ...wanted, ...change })}`);
  function search(event) {
    event.preventDefault();
    const text = new FormData(event.target).get("search").trim();
    if (/^job_[0-9a-f]{32}$/.test(text)) go(`/console/jobs/${text}`); else open({ search: text });
  }
  const form = () => h("form", { class: "filters", role: "search", onsubmit: search },
    h("label", { class: "field grow" }, h("span", {}, "Search"),
      h("input", { type: "search", name: "search", value: wanted.search, placeholder: "Id, words of the prompt, or metadata", maxlength: 64 })),
    select("status", "State", [["", "Any"], ...STATES.map((state) => [state, state.replace("_", " ")])], wanted.status, (status) => open({ status })),
    select("lane", "Lane", [["", "Any"], ...LANES.map((lane) => [lane, lane])], wanted.lane, (lane) => open({ lane })),
    select("model", "Model", [["", "Any"], ...choices.models.map((name) => [name, name])], wanted.model, (model) => open({ model })),
    select("since", "Accepted", TIMES, wanted.since, (since) => open({ since })),
    (choices.tenants.length > 1 || wanted.tenant) && select("tenant", "Tenant", [["", `${who.tenant} (yours)`], ["*", "All"], ...choices.tenants.filter((name) => name !== who.tenant).map((name) => [name, name])], wanted.tenant, (tenant) => open({ tenant })));
  draw(root, heading("Jobs"), form(), loading());
  const round = watch({
    signal, everyMs: cursor ? 0 : EVERY_MS,
    read: () => api.get(`/admin/jobs${query({ ...asked(), cursor, limit: String(PAGE) })}`, { signal }),
    show: (page, error) => draw(root, heading("Jobs"), form(), error && failed(error, round), page && list(page)),
  });
  Promise.all([api.get("/v1/models", { signal }), api.get("/admin/keys", { signal })]).then(([models, keys]) => {
    choices = { models: models.data.map(({ id }) => id), tenants: [...new Set([who.tenant, ...keys.data.map(({ tenant }) => tenant)])].sort() };
    round();
  }, () => null);

  function list(page) {
    const pager = h("nav", { class: "pager", "aria-label": "Pages of jobs" },
      cursor && h("a", { href: `/console/jobs${query(wanted)}` }, "Newest"),
      cursor && h("button", { type: "button", class: "small", onclick: () => history.back() }, "Back"),
      page.has_more && h("a", { href: `/console/jobs${query({ ...wanted, cursor: page.next_cursor })}` }, "Older"));
    if (!page.data.length) return [nothing(page), pager];
    const withTenant = choices.tenants.length > 1 || wanted.tenant !== "";
    const columns = [["State"], ["Job", null, "job"], ["Model", "wide"], ["Lane", "wide"], ...(withTenant ? [["Tenant"]] : []), ["Created"], ["Waited", "num wide"], ["Took", "num wide"], ["Tokens", "num wide"], ["Attempts", "num wide"]];
    const under = page.data.filter(({ status }) => OPEN.includes(status));
    const all = OPEN.includes(wanted.status) && under.length > 1 && h("div", { class: "actions" },
      h("button", { type: "button", class: "danger", onclick: () => cancelAll(under) }, `Cancel these ${under.length}`));
    return [all, table("Jobs, newest first", columns, page.data.map((job) => row(job, withTenant))), pager, code()];
  }

  /** Cancels the jobs of this page; one that has ended meanwhile is not a failure. */
  async function cancelAll(some) {
    if (!(await confirmed(`Cancel ${plural(some.length, "job")}?`, "Those that run stop at once. What they have generated is kept.", `Cancel ${some.length}`))) return;
    let gone = 0;
    const one = async ({ id }) => { try { gone += (await api.post(`/admin/jobs/${id}/cancel`)).already_ended; } catch (error) { if (![404, 409, 410].includes(error.status)) throw error; gone += 1; } };
    await act(async () => { for (let at = 0; at < some.length; at += AT_ONCE) await Promise.all(some.slice(at, at + AT_ONCE).map(one)); },
      () => `${plural(some.length - gone, "job")} cancelled${gone ? `, ${gone} had ended` : ""}.`);
    round();
  }

  function nothing(page) {
    if (page.has_more) return empty("None so far.", "The list was searched back as far as one page goes. ", h("a", { href: `/console/jobs${query({ ...wanted, cursor: page.next_cursor })}` }, "Search further back"));
    if (FILTERS.some((name) => wanted[name] && name !== "tenant")) return empty("No job is like that.", h("a", { href: "/console/jobs" }, "Show all jobs"));
    return empty("No job yet.", "Send one from the ", h("a", { href: "/console/chat" }, "chat"), ", or with ", h("code", {}, "penstock submit"), ".");
  }

  function code() {
    return fromCode(["Terminal", `penstock jobs ls${["status", "lane", "model", "tenant"].map((name) => wanted[name] && ` --${name} '${wanted[name]}'`).join("")}${wanted.since && ` --since ${wanted.since}s`}`],
      ["curl", `curl -H "Authorization: Bearer $KEY" '${ADDRESS}/admin/jobs${query(asked())}'`]);
  }
}

function row(job, withTenant) {
  const started = job.started_at, ended = job.completed_at, now = Date.now() / 1000;
  return [job.id, [badge(job.status), job.cancelled_by && h("span", { class: "dim" }, ` ${job.cancelled_by.replaceAll("_", " ")}`)],
    [jobLink(job.id), job.preview && h("div", { class: "dim", title: job.preview }, job.preview)], modelLink(job.model), job.priority,
    ...(withTenant ? [tenantLink(job.tenant)] : []), when(job.created_at),
    seconds(Math.max(0, (started ?? ended ?? now) - job.created_at)), started ? seconds(Math.max(0, (ended ?? now) - started)) : "–",
    count(job.usage?.completion_tokens), job.attempts > 1 ? h("span", { class: "warn-text" }, job.attempts) : job.attempts];
}
