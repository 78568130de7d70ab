// Values as people read them: numbers with units, times, ids.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : NUMBER.format(value);
}

export function plural(number, noun, many = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : many}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.9995) return milliseconds(value * 1000);
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.round(value / 86400)} days`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 ms";
  if (value >= 1000) return seconds(value / 1000);
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value < 10 ? value.toFixed(1) : count(value);
}

/** A share of 1; what is there but rounds to nothing says so. */
export function percent(share) {
  return share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, value > 0 ? Math.floor(Math.log10(value) / 3) : 0);
  const shown = value / 1000 ** power;
  return `${power && shown < 10 ? shown.toFixed(1) : Math.round(shown)} ${units[power]}`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function utc(at) {
  return new Date(at * 1000).toISOString().replace("T", " ").replace("Z", " UTC");
}

export function age(at, now = Date.now() / 1000) {
  const passed = Math.max(0, now - at);
  return passed < 1 ? "just now" : `${passed < 10 ? Math.floor(passed) + " s" : seconds(Math.round(passed))} ago`;
}

export function shortId(id) {
  const [kind, digits] = id.split("_");
  return digits ? `${kind}_${digits.slice(0, 8)}` : id;
}
