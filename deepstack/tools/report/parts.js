// Functions on elements, texts, numbers and colours that the other scripts of the page share.
const SVG = "http://www.w3.org/2000/svg";
const root = document.documentElement;
const all = (where, selector) => [...where.querySelectorAll(selector)];

// Texts come from run folders: they are set as text, without control and direction characters.
const CONTROLS = new RegExp("[\\u0000-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f" +
  "\\u2028-\\u202e\\u2066-\\u2069]", "g");
const clean = (text) => String(text).replace(CONTROLS,
  (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "line", "circle"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function store(area, name, value) {  // a page of a file may have no storage
  try {
    if (value === undefined) return area().getItem(name);
    if (value === null) area().removeItem(name); else area().setItem(name, value);
  } catch { /* the page works without */ }
  return null;
}
const isDark = () => (root.dataset.theme ||
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const local = () => window.localStorage, session = () => window.sessionStorage;

const unique = (values) => [...new Set(values)];
const ascending = (values) => unique(values).sort((a, b) => a - b);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const isKnown = (value, log) => Number.isFinite(value) && (!log || value > 0);

// words: kind of a row -> the word that readers see, for outcomes.
function readRows(link, words) {
  const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (c) => c.charCodeAt(0));
  const lines = new TextDecoder().decode(bytes).match(/(?:[^\n"]|"(?:[^"]|"")*")+/g);
  const [names, ...rows] = lines.map((line) => [...line.matchAll(/(^|,)(?:"((?:[^"]|"")*)"|([^,]*))/g)]
    .map(([, , quoted, plain]) => quoted === undefined ? plain : quoted.replace(/""/g, '"')));
  return rows.map((cells) => {
    const row = {panel: "", series: "", mark: ""};
    names.forEach((name, i) => { row[name] = cells[i]; });
    for (const name of ["x", "y", "low", "high", "n", "value"]) row[name] = parseFloat(row[name]);
    return {...row, kind: words[row.kind] || row.kind};
  });
}

function shortNumber(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value), [digits, power] = value.toExponential(3).split("e");
  return size === 0 || (size >= 1e-3 && size < 1e5) ? String(Number(value.toPrecision(5)))
    : `${Number(digits)}e${Number(power)}`;
}

function readable(colour) {  // a dark line on a dark page gets white, up to half of white's light
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const light = (0.3 * r + 0.59 * g + 0.11 * b) / 255, share = Math.round(50 / (1 - Math.min(light, 0.5)));
  return isDark() ? `color-mix(in srgb, ${colour} ${share}%, white)` : colour;
}

function limitsOf(values, log) {  // with a margin
  const usable = values.filter((v) => isKnown(v, log)).map(log ? Math.log : Number);
  if (!usable.length) return log ? [0.1, 1] : [0, 1];
  const [low, high] = [Math.min, Math.max].map((pick) => usable.reduce((a, b) => pick(a, b)));
  const isFlat = high - low < 1e-4 * Math.abs(high);  // but for rounding
  const margin = (isFlat ? 0 : (high - low) * 0.05) || Math.abs(high) * 0.05 || 0.5;
  return [low - margin, high + margin].map(log ? Math.exp : Number);
}

function decades(low, high) {  // round numbers of a logarithmic axis
  const span = Math.log10(high / low), first = Math.floor(Math.log10(low));
  const digits = span > 2.5 ? [1] : span > 1.2 ? [1, 3] : span > 0.5 ? [1, 2, 3, 5]
    : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
  return Array.from({length: Math.ceil(span) + 2}, (_, i) => digits.map((d) => d * 10 ** (first + i))).flat();
}

const dashOf = (dash, ratio) => dash ? dash.split(" ").map((part) => 1.6 * ratio * part) : [];

// The key of a style in a legend: a line with a dash, a point (dash null), or boxes of colours.
function keyOf([colour, dash, hollow]) {
  if (dash !== undefined) {
    const [stroke, isLine] = [readable(colour), dash !== null];
    const shape = isLine
      ? {x2: 22, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dashOf(dash, 1).join(" ")}
      : {cx: 5, cy: 5, r: 3.4, "stroke-width": 1.4, fill: hollow ? "var(--paper)" : stroke};
    return make("svg", {class: "key", width: isLine ? 22 : 10, height: 10},
      make(isLine ? "line" : "circle", {stroke, ...shape}));
  }
  const box = make("span", {class: "key"}), colours = Array.isArray(colour) ? colour : [readable(colour)];
  box.style.background = `linear-gradient(to right, ${[...colours, colours.at(-1)].join(", ")})`;
  return box;
}
