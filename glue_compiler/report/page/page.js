"use strict";
// Everything shown comes from the data element; text goes into the page as text nodes only.

const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = data.kinds;
const ROW = 20;
const CONTEXT = 3;
const [NAME, TEXT, SHAPE, SOURCE, CODE, LAYER] = [0, 1, 2, 3, 4, 5];
const $ = (id) => document.getElementById(id);

const state = { graph: 0, pass: -1, view: "", selected: -1, query: "", layer: "", onlyChanges: true };
let rows = [];       // what the panel shows: {heading}, {gap}, or {kind, before, after, graph}
let found = [];      // indices into rows that match the search

const field = (node, which) => (node < 0 ? "" : data.strings[data.nodes[node][which]]);
const searchText = new Map();
const textOf = (node) => {
  if (!searchText.has(node)) {
    // Without the code of the source line, which all nodes of the line share.
    searchText.set(node, [NAME, TEXT, SHAPE, SOURCE, LAYER].map((which) => field(node, which)).join("\n").toLowerCase());
  }
  return searchText.get(node);
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// -- which views there are

const graph = () => data.graphs[state.graph];
const pass = () => (state.pass < 0 ? null : graph().passes[state.pass]);

function viewsOf() {
  const current = pass();
  if (!current) return [["result", "graph after its passes"], ["syncs", `host syncs (${graph().host_syncs.length})`]];
  const views = [];
  if (current.diff.length) views.push(["diff", "before and after"]);
  if (current.prologue.length) views.push(["prologue", "once per batch"]);
  if (current.timeline) views.push(["timeline", "streams"]);
  if (current.rewrites.length) views.push(["rewrites", `single rewrites (${current.rewrites.length})`]);
  views.push(["skips", `left alone (${current.skips.length})`]);
  views.push(["syncs", `host syncs (${graph().host_syncs.length})`]);
  return views;
}

function show(change) {
  const passChanged = "graph" in change || "pass" in change;
  Object.assign(state, change);
  const views = viewsOf();
  if (!views.some(([name]) => name === state.view)) state.view = views[0][0];
  if (passChanged || "view" in change) state.selected = -1;
  renderCompile();
  renderSummary();
  renderTabs(views);
  renderPanel();
  const hash = new URLSearchParams({ graph: graph()?.id ?? "", pass: pass()?.name ?? "", view: state.view });
  history.replaceState(null, "", `#${hash}`);
}

// -- the list of graphs and passes

const milliseconds = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")) + " ms";

function renderCompile() {
  const list = $("compile");
  const focused = list.contains(document.activeElement);
  list.replaceChildren();
  data.graphs.forEach((one, index) => {
    const total = one.passes.reduce((sum, p) => sum + p.ms, 0);
    list.append(element("h2", {}, `graph ${one.id}`));
    const facts = `${one.nodes_before} → ${one.nodes_after} nodes, ${milliseconds(total)}`;
    list.append(element("p", {}, one.compile_id ? `${facts}, compile ${one.compile_id}` : facts));
    one.passes.forEach((p, number) => {
      const kind = p.error ? "failed" : p.changed ? "changed" : "idle";
      const button = element(
        "button",
        { type: "button", class: kind, "aria-current": state.graph === index && state.pass === number ? "true" : "false",
          onclick: () => show({ graph: index, pass: number }) },
        element("span", {}, p.name), element("span", { class: "muted" }, milliseconds(p.ms)),
      );
      const counted = p.nodes ? [`${p.nodes[0]} → ${p.nodes[1]} nodes`] : [p.error ? "failed, undone" : "changed nothing"];
      if (p.skips.length) counted.push(`${p.skips.length} left alone`);
      button.append(element("small", {}, counted.join(", ")));
      list.append(button);
    });
    list.append(element(
      "button",
      { type: "button", "aria-current": state.graph === index && state.pass < 0 ? "true" : "false",
        onclick: () => show({ graph: index, pass: -1 }) },
      element("span", {}, "result"), element("small", {}, `${one.host_syncs.length} host syncs`),
    ));
    if (one.graph_break) list.append(element("p", {}, `ends at a graph break: ${one.graph_break.reason.split("\n")[0]} ${one.graph_break.source}`));
  });
  if (data.capture.length) list.append(element("h2", {}, "capture"));
  for (const event of data.capture) {
    const outcome = event.retried ? "a frame was captured again" : "a frame was left to eager";
    list.append(element("p", {}, `${outcome}: ${event.reason}`));
  }
  const current = list.querySelector('[aria-current="true"]');
  current?.scrollIntoView({ block: "nearest" });
  if (focused) current?.focus();
}

function renderSummary() {
  const current = pass();
  const title = element("b", {}, current ? `graph ${graph().id}: ${current.name}` : `graph ${graph().id}: result`);
  $("summary").replaceChildren(title);
  if (!current) return;
  const counts = Object.entries(current.counts).map(([name, value]) => `${name} ${value.toLocaleString("en")}`);
  const facts = [`${current.stage} stage`, milliseconds(current.ms), ...counts];
  $("summary").append(` ${facts.join(", ")}`);
  if (current.error) $("summary").append(element("div", { class: "error" }, `failed and was undone: ${current.error}`));
}

function renderTabs(views) {
  $("tabs").replaceChildren(...views.map(([name, label], index) => element(
    "button",
    { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(name === state.view),
      "aria-controls": "panel", title: `key ${index + 1}`, onclick: () => show({ view: name }) },
    label,
  )));
  $("panel").setAttribute("aria-labelledby", `tab-${state.view}`);
}

// -- the panel

function renderPanel() {
  rows = [];
  found = [];
  $("panel").scrollTop = 0;
  if (state.view === "diff") showRows(rowsOfDiff(pass().diff));
  else if (state.view === "prologue") showRows(rowsOfGraphs(pass().prologue));
  else if (state.view === "result") showRows(rowsOfGraphs(graph().final));
  else if (state.view === "timeline") showTimeline(pass().timeline);
  else if (state.view === "rewrites") showRewrites();
  else if (state.view === "skips") showSkips();
  else showSyncs();
  search();
  renderDetails();
}

const inLayer = (node) => node >= 0 && (field(node, LAYER) + ".").startsWith(state.layer + ".");

function rowsOfDiff(graphs) {
  const made = [];
  for (const [name, cells] of graphs) {
    let kept = [];
    for (let at = 0; at < cells.length; at += 3) {
      const row = { kind: KINDS[cells[at]], before: cells[at + 1], after: cells[at + 2], graph: name };
      if (!state.layer || inLayer(row.before) || inLayer(row.after)) kept.push(row);
    }
    const changes = kept.filter((row) => row.kind !== "same").length;
    if (!kept.length || (state.onlyChanges && !changes)) continue;
    made.push({ heading: `${name}: ${changes} changes, ${kept.length} nodes` });
    if (state.onlyChanges) kept = withContext(kept);
    made.push(...kept);
  }
  return made;
}

function withContext(all) {
  const near = new Uint8Array(all.length);
  all.forEach((row, index) => {
    if (row.kind !== "same") near.fill(1, Math.max(0, index - CONTEXT), index + CONTEXT + 1);
  });
  const made = [];
  let hidden = 0;
  all.forEach((row, index) => {
    if (near[index]) {
      if (hidden) made.push({ gap: hidden });
      hidden = 0;
      made.push(row);
    } else hidden += 1;
  });
  if (hidden) made.push({ gap: hidden });
  return made;
}

function rowsOfGraphs(graphs) {
  const made = [];
  for (const [name, nodes] of graphs) {
    const kept = nodes.filter((node) => !state.layer || inLayer(node));
    if (kept.length) made.push({ heading: `${name}: ${kept.length} nodes` });
    made.push(...kept.map((node) => ({ kind: "same", before: -1, after: node, graph: name, one: true })));
  }
  return made;
}

// Rows of one height, and only those in sight are in the page.
function showRows(made) {
  rows = made;
  const body = element("div", { class: "rows", role: "listbox", "aria-label": "nodes", style: `height:${rows.length * ROW}px` });
  $("panel").replaceChildren(body);
  if (!rows.length) $("panel").replaceChildren(element("p", { class: "list muted" }, "Nothing here with this filter."));
  drawRows();
}

function drawRows() {
  const body = $("panel").querySelector(".rows");
  if (!body) return;
  const first = Math.max(0, Math.floor($("panel").scrollTop / ROW) - 10);
  const last = Math.min(rows.length, first + Math.ceil($("panel").clientHeight / ROW) + 20);
  const made = [];
  for (let index = first; index < last; index += 1) made.push(rowElement(rows[index], index));
  body.replaceChildren(...made);
}

const SIGNS = { same: "", changed: "~", removed: "−", added: "+" };
const isFound = (index) => {
  let low = 0, high = found.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (found[middle] < index) low = middle + 1;
    else high = middle;
  }
  return found[low] === index;
};

function rowElement(row, index) {
  const style = `top:${index * ROW}px`;
  if (row.heading) return element("div", { class: "row heading", style, role: "presentation" }, element("span", {}, row.heading));
  if (row.gap) return element("div", { class: "row gap", style, role: "presentation" }, element("span", {}, `${row.gap} equal nodes`));
  const sign = row.kind === "moved" ? (row.before >= 0 ? "↗" : "↙") : SIGNS[row.kind];
  const classes = ["row", row.kind, row.one ? "one" : "", isFound(index) ? "found" : ""].join(" ");
  const made = element(
    "div",
    { class: classes, style, role: "option", id: `row-${index}`, "aria-selected": String(index === state.selected),
      onclick: () => select(index) },
    element("span", { class: "sign" }, sign),
  );
  const skipped = row.kind === "changed" ? equalStart(row.before, row.after) : 0;
  if (!row.one) made.append(cell(row.before, "before", skipped));
  made.append(cell(row.after, "after", skipped));
  return made;
}

// How much of two texts is equal, up to the start of a word; 0 where the difference is in sight anyway.
function equalStart(before, after) {
  const [old, now] = [field(before, TEXT), field(after, TEXT)];
  let at = 0;
  while (at < old.length && old[at] === now[at]) at += 1;
  while (at > 0 && /\w/.test(old[at - 1])) at -= 1;
  return at > 60 ? at : 0;
}

function cell(node, side, skipped) {
  if (node < 0) return element("span", { class: `${side} none` });
  const made = element("span", { class: side }, element("span", { class: "name" }, field(node, NAME)));
  if (field(node, SHAPE)) made.append(element("span", { class: "shape" }, `: ${field(node, SHAPE)}`));
  made.append(skipped ? " = … " : " = ", ...highlighted(field(node, TEXT).slice(skipped, skipped + 600), true));
  if (field(node, SOURCE)) made.append(element("span", { class: "at" }, `  # ${field(node, SOURCE).replace(/^.*\//, "").replace(/ in .*/, "")}`));
  made.title = [field(node, CODE), field(node, SOURCE), field(node, LAYER)].filter(Boolean).join("\n");
  return made;
}

const TOKENS = /("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(\b\d[\w.]*(?:e-?\d+)?\b)|(\b(?:None|True|False|input|inf|nan)\b)|([A-Za-z_][\w.]*)(?=\()|([A-Za-z_]\w{39,})/g;

function highlighted(text, shorten) {
  const made = [];
  let at = 0;
  for (const match of text.matchAll(TOKENS)) {
    const kind = ["string", "number", "word", "call", "long"][[1, 2, 3, 4, 5].findIndex((group) => match[group] !== undefined)];
    if (kind === "long" && !shorten) continue;
    made.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    // Names of parameters spell out their whole path; the end tells them apart.
    if (kind === "long") made.push(`…${match[0].slice(-34)}`);
    else made.push(element("span", { class: kind }, match[0]));
  }
  made.push(text.slice(at));
  return made;
}

// -- selection and search

function select(index, scroll = true) {
  state.selected = index;
  const panel = $("panel");
  if (scroll) {
    const top = index * ROW;
    if (top < panel.scrollTop) panel.scrollTop = top;
    else if (top + ROW > panel.scrollTop + panel.clientHeight) panel.scrollTop = top + ROW - panel.clientHeight;
  }
  drawRows();
  panel.setAttribute("aria-activedescendant", `row-${index}`);
  renderDetails();
}

function step(by, accept = () => true) {
  const isRow = (row) => row && !row.heading && !row.gap;
  let index = state.selected < 0 && by > 0 ? -1 : state.selected;
  if (Math.abs(by) > 1) index = Math.min(rows.length, Math.max(-1, index + by - Math.sign(by)));
  for (index += Math.sign(by); index >= 0 && index < rows.length; index += Math.sign(by)) {
    if (isRow(rows[index]) && accept(rows[index], index)) return select(index);
  }
}

const isChange = (row, index) => row.kind !== "same" && (rows[index - 1]?.kind ?? "same") === "same";

function search() {
  const query = state.query.toLowerCase();
  const matches = (node) => node >= 0 && textOf(node).includes(query);
  found = query ? rows.flatMap((row, index) => (row.kind && (matches(row.before) || matches(row.after)) ? [index] : [])) : [];
  $("matches").textContent = query ? `${found.length} found` : "";
  drawRows();
}

function nextMatch(by) {
  if (!found.length) return;
  const ahead = by > 0 ? found.find((index) => index > state.selected) : found.findLast((index) => index < state.selected);
  const next = ahead ?? (by > 0 ? found[0] : found.at(-1));
  $("matches").textContent = `${found.indexOf(next) + 1} of ${found.length}`;
  select(next);
}

// A node of another view, by name: shows it even where filters hid it.
function goTo(change, name, graphName) {
  state.layer = "";
  $("layer").value = "";
  state.onlyChanges = false;
  $("only-changes").checked = false;
  show(change);
  const index = rows.findIndex((row) => row.kind && (!graphName || row.graph === graphName)
    && (field(row.after, NAME) === name || field(row.before, NAME) === name));
  if (index >= 0) select(index);
  $("panel").focus();
}

function renderDetails() {
  const row = rows[state.selected];
  if (!row || !row.kind) {
    $("details").replaceChildren(element("span", { class: "muted" }, "Select a node to see its whole text, source line and layer."));
    return;
  }
  const list = element("dl");
  const add = (label, ...content) => list.append(element("dt", {}, label), element("dd", {}, ...content));
  const whole = (node, equal = 0) => {
    const text = field(node, TEXT);
    const rest = highlighted(text.slice(equal), false);
    return [field(node, NAME), field(node, SHAPE) && `: ${field(node, SHAPE)}`, " = ",
      ...(equal ? [element("span", { class: "muted" }, text.slice(0, equal)), element("mark", {}, ...rest)] : rest)];
  };
  const node = row.after >= 0 ? row.after : row.before;
  const labels = { same: "node", added: "added", removed: "removed", moved: row.after >= 0 ? "moved here" : "moved away" };
  if (row.kind === "changed") {
    const equal = equalStart(row.before, row.after);
    add("after", ...whole(row.after, equal));
    add("before", ...whole(row.before, equal));
  } else add(labels[row.kind], ...whole(node));
  if (field(node, SOURCE)) add("source", element("span", { class: "source" }, field(node, SOURCE)), `\n${field(node, CODE)}`);
  if (field(node, LAYER)) add("layer", field(node, LAYER));
  $("details").replaceChildren(list);
}

// -- lists

function table(head, body) {
  return element("table", { class: "list" }, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))), element("tbody", {}, ...body));
}

function showRewrites() {
  $("panel").replaceChildren(table(["number", "what"], pass().rewrites.map((rewrite) => element("tr", {}, element("td", {}, String(rewrite.number)), element("td", {}, rewrite.what)))));
}

function showSkips() {
  const skips = pass().skips;
  $("panel").replaceChildren(skips.length
    ? table(["reason", "node", "source"], skips.map((skip) => element("tr", {}, element("td", {}, skip.reason), element("td", {}, skip.node), element("td", {}, skip.source))))
    : element("p", { class: "list muted" }, pass().changed ? "Nothing was left alone." : "There was nothing for this pass to do."));
}

function showSyncs() {
  const prologues = graph().passes.findIndex((p) => p.prologue.length);
  $("panel").replaceChildren(graph().host_syncs.length
    ? table(["operator", "how often", "node", "source"], graph().host_syncs.map((sync) => {
        const target = sync.once_per_batch ? { pass: prologues, view: "prologue" } : { pass: -1, view: "result" };
        const link = element("button", { type: "button", onclick: () => goTo(target, sync.node) }, sync.node);
        return element("tr", {}, element("td", {}, sync.target), element("td", {}, sync.once_per_batch ? "once per batch" : "in every call"), element("td", {}, link), element("td", {}, sync.source));
      }))
    : element("p", { class: "list muted" }, "This graph never waits for the device."));
}

// -- the streams of checkpoint offload

const SVG = "http://www.w3.org/2000/svg";

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function lanesOf(bars) {
  const lanes = [];
  for (const bar of bars) {
    const free = lanes.find((lane) => lane.at(-1)[1] <= bar[0]);
    if (free) free.push(bar);
    else lanes.push([bar]);
  }
  return lanes;
}

function showTimeline(timeline) {
  const [left, right, lane, gap] = [120, 20, 24, 6];
  const width = Math.max(900, $("panel").clientWidth - 30);
  const scale = (width - left - right) / timeline.length;
  const streams = [
    ["compute", [timeline.compute]],
    ["copy to host", lanesOf(timeline.to_host)],
    ["copy from host", lanesOf(timeline.from_host)],
  ];
  const layers = [...new Set(timeline.compute.map((bar) => bar[2]))].filter((label) => label !== "other");
  const colour = (label) => label === "other" ? "var(--line)" : `hsl(${230 - (215 * Math.max(0, layers.indexOf(label))) / Math.max(1, layers.length - 1)} 55% 62%)`;
  const height = 50 + streams.reduce((sum, [, lanes]) => sum + lanes.length * (lane + gap) + 8, 0);
  const svg = drawn("svg", { width, height, role: "img", "aria-label": "streams of one training step" });
  const border = left + timeline.backward * scale;
  svg.append(drawn("line", { class: "axis", x1: border, x2: border, y1: 8, y2: height }));
  svg.append(drawn("text", { x: left, y: 18 }, "forward"), drawn("text", { x: border + 6, y: 18 }, "backward"));
  let top = 30;
  for (const [name, lanes] of streams) {
    svg.append(drawn("text", { x: left - 10, y: top + 16, "text-anchor": "end" }, name));
    for (const bars of lanes) {
      for (const [start, end, label, graphName, node] of bars) {
        const at = left + start * scale;
        const long = Math.max(1.5, (end - start) * scale);
        const go = () => goTo({ view: "diff" }, node, graphName);
        const when = `operators ${start} to ${end}`;
        const bar = drawn("rect", {
          class: "bar", x: at, y: top, width: long, height: lane, tabindex: 0, role: "button",
          fill: name === "compute" ? colour(label) : "var(--copy)",
          "aria-label": `${name}: ${label}, ${when}`,
        }, drawn("title", {}, `${name}: ${label}\n${node}, ${when}`));
        bar.addEventListener("click", go);
        bar.addEventListener("keydown", (event) => { if (event.key === "Enter") go(); });
        svg.append(bar);
        const short = label.split(".").slice(-2).join(".");
        if (long > 7 * short.length) svg.append(drawn("text", { x: at + 4, y: top + 16, "pointer-events": "none" }, short));
      }
      top += lane + gap;
    }
    top += 8;
  }
  const note = "Left to right: the order in which the host issues the work of one step, counted in operators, not in time. "
    + "A copy's bar goes from its start to the wait for it; what the compute stream does meanwhile is above it.";
  $("panel").replaceChildren(element("p", { class: "list muted" }, note), svg);
}

// -- keys

function nextPass(by) {
  const all = data.graphs.flatMap((one, index) => [...one.passes.map((_, number) => [index, number]), [index, -1]]);
  const at = all.findIndex(([index, number]) => index === state.graph && number === state.pass);
  const [index, number] = all[(at + by + all.length) % all.length];
  show({ graph: index, pass: number });
}

const KEYS = {
  "[": () => nextPass(-1),
  "]": () => nextPass(1),
  "/": () => $("search").focus(),
  l: () => $("layer").focus(),
  c: () => $("only-changes").click(),
  "?": () => $("help").showModal(),
  j: () => step(1),
  k: () => step(-1),
  n: () => step(1, isChange),
  p: () => step(-1, isChange),
};
const PANEL_KEYS = {
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  PageDown: () => step(Math.floor($("panel").clientHeight / ROW)),
  PageUp: () => step(-Math.floor($("panel").clientHeight / ROW)),
  Home: () => { state.selected = -1; step(1); },
  End: () => { state.selected = rows.length; step(-1); },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const inField = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox";
  if (event.target === $("search")) {
    if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") { $("search").blur(); $("panel").focus(); }
    return;
  }
  if (inField) return;
  const inList = rows.length && (event.target === document.body || event.target === $("panel"));
  const views = viewsOf();
  const action = KEYS[event.key] ?? (inList ? PANEL_KEYS[event.key] : undefined)
    ?? (views[Number(event.key) - 1] ? () => show({ view: views[Number(event.key) - 1][0] }) : undefined);
  if (!action) return;
  event.preventDefault();
  action();
});

$("search").addEventListener("input", () => { state.query = $("search").value; search(); });
$("layer").addEventListener("change", () => { state.layer = $("layer").value; state.selected = -1; renderPanel(); });
$("only-changes").addEventListener("change", () => { state.onlyChanges = $("only-changes").checked; state.selected = -1; renderPanel(); });
$("help-button").addEventListener("click", () => $("help").showModal());
$("panel").addEventListener("scroll", drawRows, { passive: true });
addEventListener("resize", () => (state.view === "timeline" ? renderPanel() : drawRows()));

// -- start

$("layer").append(...data.layers.map((layer) => element("option", { value: layer }, layer)));
const total = data.graphs.reduce((sum, one) => sum + one.passes.reduce((part, p) => part + p.ms, 0), 0);
$("about").textContent = `${data.folder}: ${data.graphs.length} graph${data.graphs.length === 1 ? "" : "s"}, ${milliseconds(total)} in passes, torch ${data.torch}`;
if (data.graphs.length) {
  const asked = new URLSearchParams(location.hash.slice(1));
  const index = Math.max(0, data.graphs.findIndex((one) => String(one.id) === asked.get("graph")));
  const passes = data.graphs[index].passes;
  const named = asked.has("pass") ? passes.findIndex((p) => p.name === asked.get("pass")) : passes.findIndex((p) => p.changed);
  show({ graph: index, pass: named, view: asked.get("view") ?? "" });
} else {
  $("panel").textContent = "This dump holds no graph.";
}
document.body.dataset.ready = "true";
