"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const {plan, tried, limits, yields, tie, colours} = DATA;
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let limit = DATA.planned, chosen = Math.max(0, tried.findIndex(dot => dot.is_plan));
const off = {changes: new Set(), techniques: new Set()};

const bytes = value => {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]])
    if (Math.abs(value) >= scale) return `${(value / scale).toFixed(2)} ${unit}`;
  return `${value} B`;
};
const seconds = value => value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(2)} ms`;
const size = value => bytes(value).replace(/\.?0+ /, " ");
const words = name => name.replaceAll("_", " ");
const make = (name, attributes, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const tag = (name, text, parent) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};
const shown = one => !one.changes.some(x => off.changes.has(x)) && !one.techniques.some(x => off.techniques.has(x));
const fits = dot => dot.from <= limit;
const cost = dot => dot.seconds_per_step * dot.weight;

function best() {
  const fitting = tried.map((_, i) => i).filter(i => shown(tried[i]) && fits(tried[i]));
  const there = new Set(fitting.map(i => tried[i].combination));
  const may = fitting.filter(i => !yields[tried[i].combination].some(other => there.has(other)));
  if (!may.length) return -1;
  const least = Math.min(...may.map(i => cost(tried[i])));
  return may.filter(i => cost(tried[i]) <= least * (1 + tie)).sort((a, b) => tried[a].rank - tried[b].rank)[0];
}
function front() {
  let least = Infinity;
  const found = [];
  tried.forEach((dot, i) => {
    if (shown(dot) && dot.seconds_per_step < least) { least = dot.seconds_per_step; found.push(i); }
  });
  return found;
}
const filtered = () => off.changes.size + off.techniques.size > 0;

function drawChart(atBest) {
  const svg = $("chart"), width = Math.max(300, svg.clientWidth), height = width < 600 ? 320 : 420;
  const edge = {left: 62, right: 14, top: 30, bottom: 44};
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const xs = [...tried.map(d => d.needed_bytes), limits[0].usable_bytes, limits.at(-1).usable_bytes].filter(v => v > 0);
  const ys = tried.map(d => d.seconds_per_step);
  const x0 = Math.log(Math.min(...xs) * .95), x1 = Math.log(Math.max(...xs) * 1.05);
  const y0 = Math.log(Math.min(...ys, 1e9) * .9), y1 = Math.log(Math.max(...ys, 1e-9) * 1.1);
  const X = v => edge.left + (Math.log(v) - x0) / (x1 - x0) * (width - edge.left - edge.right);
  const Y = v => height - edge.bottom - (Math.log(v) - y0) / (y1 - y0) * (height - edge.top - edge.bottom);
  const ticks = (low, high, room) => {
    const values = [];
    for (let e = -6; e < 16; e++) for (const m of [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const v = m * 10 ** e;
      if (Math.log(v) >= low && Math.log(v) <= high) values.push(v);
    }
    return values.filter((_, i) => i % Math.max(1, Math.ceil(values.length / room)) === 0);
  };
  const [unit, scale] = Math.exp(x1) >= 4 * 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  for (const v of ticks(x0 - Math.log(scale), x1 - Math.log(scale), width / 60)) {
    const x = X(v * scale);
    svg.append(make("line", {class: "grid", x1: x, x2: x, y1: edge.top, y2: height - edge.bottom}));
    svg.append(make("text", {class: "soft", x, y: height - edge.bottom + 18, "text-anchor": "middle"}, `${+v.toPrecision(3)}`));
  }
  if (tried.length) for (const v of ticks(y0, y1, 7)) {
    svg.append(make("line", {class: "grid", x1: edge.left, x2: width - edge.right, y1: Y(v), y2: Y(v)}));
    svg.append(make("text", {class: "soft", x: edge.left - 6, y: Y(v) + 4, "text-anchor": "end"},
      v >= 1 ? `${+v.toPrecision(3)} s` : `${+(v * 1000).toPrecision(3)} ms`));
  }
  svg.append(make("text", {class: "soft", x: width - edge.right, y: height - 6, "text-anchor": "end"},
    `memory needed (${unit}), against time per step`));
  const line = front();
  let path = "";
  line.forEach((i, k) => {
    const dot = tried[i], x = X(dot.needed_bytes), y = Y(dot.seconds_per_step);
    path += k ? `H${x}V${y}` : `M${x},${y}`;
  });
  if (path) svg.append(make("path", {class: "front", d: path}));
  tried.forEach((dot, i) => {
    if (!shown(dot)) return;
    const kind = `dot ${dot.changes.length ? "lossy" : "exact"}${fits(dot) ? "" : " over"}`;
    const at = {cx: X(dot.needed_bytes), cy: Y(dot.seconds_per_step), r: line.includes(i) ? 5.5 : 3.5};
    const circle = make("circle", {...at, class: kind, "data-dot": i});
    circle.append(make("title", {}, `${dot.label}\n${bytes(dot.needed_bytes)}, ${seconds(dot.seconds_per_step)} per step`));
    circle.addEventListener("click", () => { chosen = i; update(); });
    svg.append(circle);
    for (const [is, name, r] of [[i === chosen, "ring", 9], [i === atBest, "ring best", 12]])
      if (is) svg.append(make("circle", {cx: at.cx, cy: at.cy, r, class: name}));
  });
  const at = limits[limit], x = X(Math.max(at.usable_bytes, Math.exp(x0)));
  const handle = make("g", {id: "limit", tabindex: 0, role: "slider", "aria-label": "Limit of the device",
    "aria-valuemin": 0, "aria-valuemax": limits.length - 1, "aria-valuenow": limit, "aria-valuetext": size(at.capacity_bytes)});
  handle.append(make("line", {class: "limit", x1: x, x2: x, y1: edge.top, y2: height - edge.bottom}));
  handle.append(make("rect", {class: "grip", x: x - 14, y: edge.top - 6, width: 28, height: height - edge.top - edge.bottom + 6}));
  handle.append(make("circle", {class: "knob", cx: x, cy: edge.top, r: 7}));
  const end = x > width * .6;
  handle.append(make("text", {x: x + (end ? -12 : 12), y: 16, "text-anchor": end ? "end" : "start"},
    `a device of ${size(at.capacity_bytes)}`));
  handle.addEventListener("pointerdown", event => {
    event.preventDefault();
    const move = e => {
      const value = Math.exp(x0 + ((e.clientX - svg.getBoundingClientRect().left) * width / svg.clientWidth - edge.left)
        / (width - edge.left - edge.right) * (x1 - x0));
      const gap = l => Math.abs(Math.log(Math.max(1, l.usable_bytes) / value));
      const next = limits.reduce((a, l, i) => gap(l) < gap(limits[a]) ? i : a, 0);
      if (next !== limit) { limit = next; update(true); }
    };
    const stop = () => { window.removeEventListener("pointermove", move); window.removeEventListener("pointerup", stop); };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", stop);
  });
  handle.addEventListener("keydown", event => {
    const by = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10,
      Home: -limits.length, End: limits.length}[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    limit = Math.min(limits.length - 1, Math.max(0, limit + by));
    update(true);
    $("limit").focus();
  });
  svg.append(handle);
}

function sayBest(i) {
  const out = $("best"), where = `a device of ${size(limits[limit].capacity_bytes)}`;
  out.replaceChildren();
  if (i < 0) tag("p", `None of the settings shown fits ${where}.`, out);
  else {
    const dot = tried[i];
    tag("strong", `Best of those shown on ${where}: ${dot.label}`, out);
    tag("p", `${bytes(dot.needed_bytes)} of ${bytes(limits[limit].usable_bytes)} usable, ${seconds(dot.seconds_per_step)} per ` +
      `step, ${Math.round(dot.per_s)} ${DATA.unit}/s. Changes in the numbers: ${dot.changes.join(", ") || "none"}.`, out);
    const button = tag("button", "Choose this one", out);
    button.id = "choose-best";
    button.addEventListener("click", () => { chosen = i; update(); });
  }
  tag("p", limit === DATA.planned && !filtered()
    ? "This is the limit that was planned for: the search has proved its plan against all combinations."
    : `Combinations that were not traced may be better here. To know, plan for it: --device ` +
      size(limits[limit].capacity_bytes).replace(" ", ""), out);
}

function sayChosen() {
  const dot = tried[chosen];
  $("chosen").hidden = !dot;
  if (!dot) return;
  $("label").textContent = dot.label;
  const room = dot.from <= DATA.planned ? "fits the device that was planned for" : "does not fit the device that was planned for";
  $("facts").textContent = `${dot.is_plan ? "The plan. " : ""}Needs ${bytes(dot.needed_bytes)}, of which live tensors at the peak ` +
    `${bytes(dot.peak_bytes)}; ${seconds(dot.seconds_per_step)} per step, ${Math.round(dot.per_s)} ${DATA.unit}/s; ${room}. ` +
    `Changes in the numbers: ${dot.changes.join(", ") || "none"}.`;
  const rows = $("breakdown");
  rows.replaceChildren();
  for (const [tier, entries] of Object.entries(dot.breakdown)) for (const [name, value] of Object.entries(entries)) {
    const row = tag("tr", undefined, rows), head = tag("th", undefined, row);
    const key = tag("i", undefined, head);
    key.style.background = colours[name] || "transparent";
    head.append(words(name) + (tier === "device" ? "" : `, ${words(tier)}`));
    tag("td", bytes(value), row);
  }
  $("yaml").value = dot.yaml;
}

function filters() {
  for (const kind of ["changes", "techniques"]) {
    for (const name of [...new Set(tried.flatMap(one => one[kind]))].sort()) {
      const line = tag("label", undefined, $(kind)), box = tag("input", undefined, line);
      box.type = "checkbox";
      box.checked = true;
      box.dataset.name = name;
      line.append(` ${kind === "techniques" ? words(name) : name}`);
      box.addEventListener("change", () => { off[kind][box.checked ? "delete" : "add"](name); update(); });
    }
    if (!$(kind).querySelector("input")) tag("span", "none", $(kind));
  }
  limits.forEach((one, i) => {
    const button = tag("button", size(one.capacity_bytes), $("sizes"));
    button.dataset.limit = i;
    button.addEventListener("click", () => { limit = i; update(); });
  });
}

function update(keepPlace) {
  const i = best();
  drawChart(i);
  sayBest(i);
  if (!keepPlace) sayChosen();
  document.querySelectorAll("#sizes button").forEach(b => b.setAttribute("aria-pressed", +b.dataset.limit === limit));
}

$("chart").addEventListener("keydown", event => {
  const by = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (!by || event.target.id === "limit") return;
  event.preventDefault();
  for (let i = chosen + by; i >= 0 && i < tried.length; i += by) if (shown(tried[i])) { chosen = i; break; }
  update();
});
$("copy").addEventListener("click", () => {
  $("yaml").select();
  const done = () => { $("copied").textContent = "Copied."; };
  if (navigator.clipboard) navigator.clipboard.writeText($("yaml").value).then(done, () => document.execCommand("copy") && done());
  else if (document.execCommand("copy")) done();
});
filters();
update();
window.addEventListener("resize", () => update());
