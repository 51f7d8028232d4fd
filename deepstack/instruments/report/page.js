
"use strict";
// The page is complete without this script: it adds sorting, filters and charts with values.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255"];
  const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962",
    "#addc30", "#fde725"];
  const TIP_ROWS = 6, FEW_INTERVALS = 3, FEW_ROWS = 6, FEW_TICKS = 8;
  const root = document.documentElement;
  const all = (where, selector) => [...where.querySelectorAll(selector)];

  // Texts come from run folders: they are set as text, without control and direction characters.
  const CONTROLS = new RegExp("[\\u0000-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2066-\\u2069]", "g");
  const clean = (text) => String(text).replace(CONTROLS,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "line", "text", "circle", "rect", "g", "title"].includes(tag);
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
  const local = () => window.localStorage, session = () => window.sessionStorage;

  // --- theme ---------------------------------------------------------------------------------

  const isDark = () => (root.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const themeButton = make("button", {type: "button", id: "theme", title: "Light or dark (key: d)"});
  const redraws = [];

  function showTheme() {
    themeButton.textContent = isDark() ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} mode`);
    redraws.forEach((draw) => draw());
  }

  function changeTheme() {
    root.dataset.theme = isDark() ? "light" : "dark";
    store(local, "deepstack-theme", root.dataset.theme);
    showTheme();
  }

  // --- tables --------------------------------------------------------------------------------

  const valueOf = (cell) => cell.dataset.v !== undefined ? cell.dataset.v : cell.textContent.trim();

  function numberOf(cell) {
    const text = valueOf(cell).replace(/,/g, "").replace("−", "-");
    return text === "" ? NaN : Number(text);
  }

  function sortRows(table, index, direction) {
    const body = table.tBodies[0], rows = [...body.rows];
    const numeric = rows.some((row) => !Number.isNaN(numberOf(row.cells[index])));
    const empty = (row) => ["", "–", "None"].includes(valueOf(row.cells[index]));
    const compare = (a, b) => {
      if (empty(a) || empty(b)) return empty(a) - empty(b);  // last in both directions
      const [x, y] = [a, b].map((row) => numberOf(row.cells[index]));
      const both = numeric && !Number.isNaN(x) && !Number.isNaN(y);
      return direction * (both ? x - y : valueOf(a.cells[index]).localeCompare(
        valueOf(b.cells[index]), "en", {numeric: true}));
    };
    body.append(...rows.sort(compare));
    all(table, "th").forEach((th, i) => i === index
      ? th.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending")
      : th.removeAttribute("aria-sort"));
  }

  // A filter is words, each in some cell, and conditions on columns: `depth>6 deepnorm`.
  function conditionOf(word, names) {
    const parts = /^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/.exec(word);
    const key = parts && parts[1].toLowerCase();
    const index = parts ? [names.indexOf(key), names.findIndex((n) => n.endsWith("." + key)),
      names.findIndex((n) => n.startsWith(key))].find((i) => i >= 0) : undefined;
    if (index === undefined) return (row) => row.textContent.toLowerCase().includes(word);
    const [, , sign, wanted] = parts;
    return (row) => {
      const cell = row.cells[index], x = numberOf(cell), y = Number(wanted);
      const both = !Number.isNaN(x) && !Number.isNaN(y);
      const text = cell.textContent.trim().toLowerCase();
      if (sign === "=") return both ? x === y : text.includes(wanted);
      if (sign === "!=") return both ? x !== y : !text.includes(wanted);
      if (!both) return false;
      return {"<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y}[sign];
    };
  }

  function addTools(table, number) {
    const rows = [...table.tBodies[0].rows], heads = all(table, "thead th");
    const names = heads.map((th) => th.textContent.trim().toLowerCase());
    heads.forEach((th, index) => {
      const button = make("button", {type: "button", title: "Sort"}, th.textContent);
      button.addEventListener("click", () =>
        sortRows(table, index, th.getAttribute("aria-sort") === "ascending" ? -1 : 1));
      th.replaceChildren(button);
      th.setAttribute("scope", "col");
    });
    if (rows.length < FEW_ROWS) return;
    const tools = make("div", {class: "tools"});
    const search = make("input", {type: "search", placeholder: "Filter: words, N>6, …",
      "aria-label": "Filter rows", title: "Words, or conditions such as N>6 (key: /)"});
    const count = make("output"), selects = [];
    heads.forEach((th, index) => {
      if (selects.length === 4 || rows.some((row) => row.cells[index].classList.contains("number")
        && th.textContent.trim() !== "N")) return;
      const values = [...new Set(rows.map((row) => row.cells[index].textContent.trim()))];
      if (values.length < 2 || values.length > 12 || values.length === rows.length) return;
      const select = make("select", {"aria-label": `Show only one ${clean(th.textContent)}`},
        make("option", {value: ""}, `${th.textContent}: all`));
      values.forEach((value) => select.append(make("option", {value: "=" + value}, value)));
      select.addEventListener("change", filter);
      selects.push([select, index]);
    });
    function filter() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const tests = words.map((word) => conditionOf(word, names));
      for (const [select, index] of selects) if (select.value)
        tests.push((row) => "=" + row.cells[index].textContent.trim() === select.value);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !tests.every((test) => test(row));
        shown += !row.hidden;
      }
      count.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} rows`;
      store(session, `filter-${number}`, search.value || null);
    }
    search.value = store(session, `filter-${number}`) || "";
    search.addEventListener("input", filter);
    search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { search.value = ""; filter(); search.blur(); }
    });
    tools.append(search, ...selects.map(([select]) => select), count);
    table.parentElement.before(tools);
    if (search.value) filter();
  }

  // --- charts --------------------------------------------------------------------------------

  function parseCsv(text) {
    const rows = [];
    let row = [], cell = "", quoted = false;
    for (let i = 0; i < text.length; i++) {
      const c = text[i];
      if (quoted) {
        if (c !== '"') cell += c;
        else if (text[i + 1] === '"') { cell += c; i++; } else quoted = false;
      } else if (c === '"') quoted = true;
      else if (c === ",") { row.push(cell); cell = ""; }
      else if (c === "\n") { row.push(cell); rows.push(row); row = []; cell = ""; }
      else cell += c;
    }
    const names = rows.shift();
    return rows.map((cells) => Object.fromEntries(names.map((name, i) => [name, cells[i]])));
  }

  // words: kind of a row -> the word that readers see, for outcomes.
  function readRows(link, words) {
    const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (c) => c.charCodeAt(0));
    const number = (cell) => cell === undefined || cell === "" ? NaN : Number(cell);
    return parseCsv(new TextDecoder().decode(bytes)).map((row) => ({
      panel: row.panel || "", series: clean(row.series || ""), kind: words[row.kind] || row.kind,
      mark: row.mark || "",
      x: number(row.x), y: number(row.y), low: number(row.low), high: number(row.high),
      n: number(row.n), value: number(row.value)}));
  }

  function shortNumber(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
      const [digits, power] = value.toExponential(3).split("e");
      return `${Number(digits)}e${Number(power)}`;
    }
    return String(Number(value.toPrecision(5)));
  }

  function rgb(colour) { return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)); }
  const hex = (parts) => "#" + parts.map((p) => Math.round(p).toString(16).padStart(2, "0")).join("");
  function readable(colour) {  // a dark line on a dark page is made lighter
    const [r, g, b] = rgb(colour), light = (0.3 * r + 0.59 * g + 0.11 * b) / 255;
    const share = isDark() && light < 0.45 ? 0.55 : 0;
    return hex([r, g, b].map((part) => part + (255 - part) * share));
  }
  function viridis(fraction) {
    const place = Math.min(Math.max(fraction, 0), 1) * (VIRIDIS.length - 1);
    const i = Math.min(Math.floor(place), VIRIDIS.length - 2);
    const [a, b] = [rgb(VIRIDIS[i]), rgb(VIRIDIS[i + 1])];
    return a.map((part, k) => part + (b[k] - part) * (place - i));
  }

  function ticksOf(low, high, log, wanted, whole) {
    if (log) {
      const decades = Math.log10(high / low);
      const digits = decades <= 1.2 ? [1, 2, 3, 5] : decades <= 2.5 ? [1, 3] : [1];
      const ticks = [], step = Math.max(1, Math.ceil(decades / wanted));
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
        if (p % step === 0) digits.forEach((d) => ticks.push(d * 10 ** p));
      const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
      if (inside.length >= 2) return inside;
    }
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((d) => d * power).find((s) => s >= rough) || power * 10;
    if (whole) step = Math.max(1, step);
    const ticks = [];
    for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) ticks.push(t);
    return ticks.filter((t) => !log || t > 0);
  }

  function scaleOf(values, log, from, to) {
    let usable = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    if (!usable.length) usable = [log ? 0.1 : 0, 1];
    const to01 = log ? Math.log : (v) => v, back = log ? Math.exp : (v) => v;
    let low = Infinity, high = -Infinity;
    for (const v of usable) { low = Math.min(low, to01(v)); high = Math.max(high, to01(v)); }
    const isFlat = high - low < 1e-4 * Math.abs(high);  // but for rounding
    const margin = (isFlat ? 0 : (high - low) * 0.05) || Math.abs(high) * 0.05 || 0.5;
    low -= margin; high += margin;
    const place = (v) => from + (to01(v) - low) / (high - low) * (to - from);
    return {place, low: back(low), high: back(high)};
  }

  class Figure {
    constructor(figure, description) {
      this.figure = figure;
      this.rows = readRows(figure.querySelector("figcaption a"), description.words);
      this.panels = description.panels.map((panel) => ({...panel,
        rows: this.rows.filter((row) => row.panel === panel.name &&
          (panel.kinds.includes(row.kind) || row.kind === "level" || row.kind === "reference" ||
            row.kind === "frontier"))}));
      this.legendColours = description.legend;
      this.cells = this.rows.some((row) => row.kind === "cell");
      // The boxes of a map have the colours of the legend, by kind.
      this.map = !this.cells && this.rows.every((row) => row.kind === "frontier" ||
        Object.hasOwn(this.legendColours, row.kind));
      this.off = new Set();
      const drawn = this.rows.filter((row) => Number.isFinite(row.x) && row.kind !== "fit");
      if (!drawn.length || (!this.map && !this.cells && !drawn.some((r) => Number.isFinite(r.y)))) return;
      this.series = [...new Set(drawn.filter((row) => !this.map && !this.cells)
        .map((row) => row.series))];
      this.flipped = {x: false, y: false};
      this.build();
    }

    // Colour, dash (null without a line), hollow points and bars, as in the figure.
    style(series, panel, kind) {
      const styles = [panel, ...this.panels].filter(Boolean).map((p) => p.styles);
      const place = Math.max(this.series.indexOf(series), 0) % PALETTE.length;
      const known = styles.map((s) => (s[kind] || {})[series]).find(Boolean) ||
        styles.flatMap((s) => Object.values(s)).map((s) => s[series]).find(Boolean);
      const [colour, dash, hollow, bars] = known ||
        [this.legendColours[series.replace(/_/g, " ")] || PALETTE[place], "", false, false];
      const lengths = dash && dash.split(" ").map((part) => 1.6 * Number(part)).join(" ");
      return {colour: readable(colour), dash: lengths, hollow, bars};
    }

    key({colour, dash, hollow}) {
      if (dash !== null) return make("svg", {class: "key", width: 22, height: 8}, make("line",
        {x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash}));
      return make("svg", {class: "key", width: 10, height: 10}, make("circle", {cx: 5, cy: 5, r: 3.4,
        stroke: colour, "stroke-width": 1.4, fill: hollow ? "var(--paper)" : colour}));
    }

    isLog(panel, axis) { return panel[`log_${axis}`] !== this.flipped[axis]; }

    build() {
      const image = this.figure.querySelector("img");
      const tools = make("div", {class: "tools"});
      this.holder = make("div", {class: "panels"});
      this.legend = make("div", {class: "legend", role: "group", "aria-label": "Series"});
      const paper = make("button", {type: "button", "aria-pressed": "false", class: "paper"},
        "Printed figure");
      paper.addEventListener("click", () => {
        const shows = !image.hidden;
        image.hidden = shows;
        this.holder.hidden = this.legend.hidden = !shows;
        if (shows) { this.holder.removeAttribute("style"); this.draw(); }
        paper.setAttribute("aria-pressed", String(!shows));
      });
      if (!this.map && !this.cells) for (const axis of ["x", "y"]) {
        const button = make("button", {type: "button", class: `scale-${axis}`});
        const label = () => {
          const scales = this.panels.map((p) => this.isLog(p, axis) ? "log" : "linear");
          button.textContent = `${axis}: ${[...new Set(scales)].join(", ")}`;
        };
        button.title = "Logarithmic or linear scale";
        button.addEventListener("click", () => {
          this.flipped[axis] = !this.flipped[axis];
          label();
          this.draw();
        });
        label();
        tools.append(button);
      }
      tools.append(paper);
      image.before(tools, this.legend, this.holder);
      image.hidden = true;
      this.draw();
      redraws.push(() => this.draw());
    }

    draw() {
      if (this.holder.hidden) return;
      this.holder.classList.toggle("single", this.panels.length === 1);
      this.holder.classList.toggle("four", this.panels.length === 4);
      this.drawLegend();
      this.holder.replaceChildren();
      const titles = this.panels.map((p) => p.title || (this.panels.length > 1 ? p.name : ""));
      const boxes = titles.map((title, i) => {
        const twice = titles.indexOf(title) !== i || titles.lastIndexOf(title) !== i;
        const {name} = this.panels[i];
        const longer = name.startsWith(title) ? name : `${title}: ${name}`;
        const words = clean(twice && title ? longer : title);
        return make("div", {class: "panel"}, ...(words ? [make("h5", {}, words)] : []));
      });
      this.holder.append(...boxes);  // all of them first: their number settles their width
      for (const [i, panel] of this.panels.entries()) {
        const box = boxes[i];
        if (this.cells) this.drawHeat(box, panel);
        else if (this.map) this.drawMap(box, panel);
        else this.drawLines(box, panel);
      }
    }

    drawLegend() {
      if (this.map) {
        const kinds = [...new Set(this.rows.map((row) => row.kind))].filter((k) => k !== "frontier");
        this.legend.replaceChildren(...kinds.map((kind) => {
          const key = make("span", {class: "key"});
          key.style.background = this.kindColour(kind);
          return make("span", {}, key, clean(kind));
        }));
        return;
      }
      this.legend.replaceChildren(...this.series.filter(Boolean).map((name) => {
        const button = make("button", {type: "button", "aria-pressed": String(!this.off.has(name)),
          title: "Click: on or off. Double click: only this one."}, this.key(this.style(name)), name);
        button.addEventListener("click", () => this.toggle(name));
        button.addEventListener("dblclick", () => {
          this.off = new Set(this.series.filter((other) => other !== name));
          this.draw();
        });
        return button;
      }));
      if (this.off.size) {
        const button = make("button", {type: "button"}, "Show all");
        button.addEventListener("click", () => { this.off.clear(); this.draw(); });
        this.legend.append(button);
      }
      this.legend.append(...this.kindKeys(), ...this.levelKeys());
      this.legend.hidden = this.series.length < 2 && this.legend.querySelector("span") === null;
    }

    // What points without a line mean beside lines: `validation` beside `training`.
    kindKeys() {
      const lines = new Map();
      for (const {styles} of this.panels) for (const [kind, of] of Object.entries(styles))
        if (kind !== "level" && kind !== "reference") lines.set(kind, Object.values(of)[0]);
      const isMixed = new Set([...lines.values()].map(([, dash]) => dash === null)).size > 1;
      const grey = readable("#555555");
      return isMixed ? [...lines].map(([kind, [, dash, hollow]]) => make("span", {},
        this.key({colour: grey, dash: dash === null ? null : "", hollow}), clean(kind))) : [];
    }

    levelKeys() {
      const levels = this.rows.filter((r) => r.kind === "level" && !Number.isFinite(r.x));
      return [...new Set(levels.map((row) => row.series))].map((name) => make("span",
        {class: "level"}, this.key(this.style(name, null, "level")), name));
    }

    toggle(name) {
      if (!this.off.delete(name)) this.off.add(name);
      const place = this.series.indexOf(name);
      this.draw();
      const buttons = all(this.legend, "button");  // the focus stays on the redrawn button
      (buttons.find((b) => b.textContent === name) || buttons[place] || this.holder).focus();
    }

    kindColour(kind) {
      const kinds = [...new Set(this.rows.map((row) => row.kind))];
      return readable(this.legendColours[kind] || PALETTE[kinds.indexOf(kind) % PALETTE.length]);
    }

    frame(box, panel, height, margins, label) {
      const width = Math.max(box.clientWidth, 240);
      const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "img",
        "aria-label": clean(`${label}. Arrow keys show values.`)});
      box.append(svg);
      return {svg, width, height, left: margins.left, top: margins.top,
        right: width - margins.right, bottom: height - margins.bottom};
    }

    labelAxes(f, panel) {
      f.svg.append(
        make("text", {x: (f.left + f.right) / 2, y: f.height - 4, "text-anchor": "middle"}, clean(panel.x)),
        make("text", {x: 2, y: 10}, clean(panel.y)));
    }

    drawLines(box, panel) {
      const [logX, logY] = ["x", "y"].map((axis) => this.isLog(panel, axis));
      const isOn = (row) => !this.off.has(row.series);
      const isDrawn = (row) => isOn(row) && Number.isFinite(row.x) && Number.isFinite(row.y) &&
        row.kind !== "fit" && (!logY || row.y > 0) && (!logX || row.x > 0);
      const isLevel = (row) => isOn(row) && Number.isFinite(row.y) && !Number.isFinite(row.x);
      const rows = panel.rows.filter(isDrawn), levels = panel.rows.filter(isLevel);
      // Panels with one scale of values in the figure have one here.
      const alike = this.panels.filter((p) => p.share === panel.share).flatMap((p) => p.rows);
      const shared = alike.filter(isDrawn);
      const f = this.frame(box, panel, 250, {left: 50, right: 10, top: 20, bottom: 36},
        panel.title || panel.name || this.figure.querySelector("h4").textContent);
      const least = shared.reduce((low, r) => Math.min(low, r.y), Infinity) / 3;
      const ends = shared.flatMap((r) => [r.low, r.high]).map((v) => logY && v < least ? NaN : v);
      const x = scaleOf(rows.map((r) => r.x), logX, f.left, f.right);
      const y = scaleOf([...shared, ...alike.filter(isLevel)].map((r) => r.y).concat(ends),
        logY, f.bottom, f.top);
      const whole = rows.every((r) => Number.isInteger(r.x));
      const own = [...new Set(rows.map((r) => r.x))].sort((a, b) => a - b);
      const places = own.length <= FEW_TICKS ? own : ticksOf(x.low, x.high, logX, 6, whole);
      let last = -Infinity;
      for (const tick of places) {
        const at = x.place(tick), text = shortNumber(tick);
        f.svg.append(make("line", {class: "grid", x1: at, x2: at, y1: f.top, y2: f.bottom}));
        if (at - last < text.length * 6.5 + 8) continue;
        f.svg.append(make("text", {x: at, y: f.bottom + 14, "text-anchor": "middle"}, text));
        last = at;
      }
      const heights = ticksOf(y.low, y.high, logY, 5);
      const digits = Math.max(...heights.map((t) => (shortNumber(t).split(".")[1] || "").length));
      const label = (t) => logY || shortNumber(t).includes("e") ? shortNumber(t) : t.toFixed(digits);
      for (const tick of heights) {
        const at = y.place(tick);
        f.svg.append(make("line", {class: "grid", x1: f.left, x2: f.right, y1: at, y2: at}),
          make("text", {x: f.left - 5, y: at + 4, "text-anchor": "end"}, label(tick)));
      }
      f.svg.append(make("path", {class: "axis", fill: "none",
        d: `M${f.left} ${f.top}V${f.bottom}H${f.right}`}));
      this.labelAxes(f, panel);
      for (const row of levels) {
        const {colour, dash} = this.style(row.series, panel, "level");
        f.svg.append(make("line", {class: "level", x1: f.left, x2: f.right, y1: y.place(row.y),
          y2: y.place(row.y), stroke: colour, "stroke-width": 1.2, "stroke-dasharray": dash},
        make("title", {}, `${row.series} ${shortNumber(row.y)}`)));
      }
      for (const curve of this.curves(rows)) this.drawCurve(f, curve, panel, x, y, logY);
      this.addHover(f, box, panel, rows, levels, x, y);
    }

    curves(rows) {  // a series is several curves where x begins again
      const curves = [];
      let current = null;
      for (const row of rows) {
        if (!current || current.series !== row.series || current.kind !== row.kind ||
            row.x <= current.points[current.points.length - 1].x) {
          current = {series: row.series, kind: row.kind, points: []};
          curves.push(current);
        }
        current.points.push(row);
      }
      return curves;
    }

    drawCurve(f, {series, kind, points}, panel, x, y, logY) {
      const {colour, dash, hollow, bars} = this.style(series, panel, kind);
      const inside = (v) => Math.min(Math.max(v, f.top), f.bottom);
      const known = points.filter((p) => Number.isFinite(p.low) && Number.isFinite(p.high));
      const bottom = (p) => logY && p.low <= 0 ? f.bottom : inside(y.place(p.low));
      if (known.length > 1 && !bars) {
        const upper = known.map((p) => `${x.place(p.x)} ${inside(y.place(p.high))}`);
        const lower = known.map((p) => `${x.place(p.x)} ${bottom(p)}`).reverse();
        f.svg.append(make("path", {d: `M${[...upper, ...lower].join("L")}Z`, fill: colour,
          "fill-opacity": 0.16}));
      } else for (const p of known) f.svg.append(make("line", {x1: x.place(p.x), x2: x.place(p.x),
        class: "bar", y1: bottom(p), y2: inside(y.place(p.high)), stroke: colour,
        "stroke-width": 1.2}));
      const joined = kind === "point" ? points.filter((p) => p.mark !== "diverged") : points;
      const path = joined.map((p) => `${x.place(p.x).toFixed(1)} ${y.place(p.y).toFixed(1)}`);
      if (kind !== "reference" && dash !== null) f.svg.append(make("path", {d: `M${path.join("L")}`,
        fill: "none", stroke: colour, "stroke-width": 1.6, class: "curve", "stroke-dasharray": dash}));
      if (points.length <= 24) for (const p of points) f.svg.append(make("circle", {
        cx: x.place(p.x), cy: y.place(p.y), r: 3.2, stroke: colour, "stroke-width": 1.4,
        fill: p.mark || hollow ? "var(--paper)" : colour}));
    }

    addHover(f, box, panel, rows, levels, x, y) {
      const tip = make("div", {class: "tip", hidden: ""});
      const voice = make("div", {class: "unseen", "aria-live": "polite"});
      const cross = make("line", {class: "cross", y1: f.top, y2: f.bottom, visibility: "hidden"});
      f.svg.append(cross);
      box.append(tip, voice);
      const places = [...new Set(rows.map((row) => row.x))].sort((a, b) => a - b);
      const curves = this.curves(rows);
      let index = -1;
      const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); index = -1; };
      const show = (at, height) => {
        const place = places[index = at], px = x.place(place);
        const values = [];
        for (const curve of curves) {
          const near = curve.points.reduce((a, b) =>
            Math.abs(x.place(b.x) - px) < Math.abs(x.place(a.x) - px) ? b : a);
          if (Math.abs(x.place(near.x) - px) <= 6) values.push(near);
        }
        const distance = (row) => height === null ? 0 : Math.abs(y.place(row.y) - height);
        values.sort((a, b) => distance(a) - distance(b));
        const shown = values.slice(0, TIP_ROWS), nearest = shown[0];
        shown.sort((a, b) => b.y - a.y);
        const lines = shown.map((row) => {
          let text = `${row.series || "value"} ${shortNumber(row.y)}`;
          const isShort = shown.length > FEW_INTERVALS && row !== nearest;
          if (!isShort && Number.isFinite(row.low) && Number.isFinite(row.high))
            text += ` (${shortNumber(row.low)} to ${shortNumber(row.high)}, n = ${row.n})`;
          if (row.x !== place) text += ` at ${shortNumber(row.x)}`;
          if (row.mark) text += `, ${clean(row.mark)}`;
          return make("div", {class: row === nearest && height !== null ? "near" : ""},
            this.key(this.style(row.series, panel, row.kind)), text);
        });
        if (values.length > shown.length)
          lines.push(make("div", {}, `and ${values.length - shown.length} more`));
        const head = `${clean(panel.x) || "x"} ${shortNumber(place)}`;
        tip.replaceChildren(make("b", {}, head), ...lines);
        cross.setAttribute("x1", px);
        cross.setAttribute("x2", px);
        cross.setAttribute("visibility", "visible");
        this.placeTip(f, box, tip, px, f.top);
        voice.textContent = height === null ? tip.textContent : "";
      };
      const follow = (event) => {
        if (!places.length) return;
        const where = f.svg.getBoundingClientRect(), px = event.clientX - where.left;
        const nearest = places.reduce((a, b, i) =>
          Math.abs(x.place(b) - px) < Math.abs(x.place(places[a]) - px) ? i : a, 0);
        show(nearest, event.clientY - where.top);
      };
      f.svg.addEventListener("pointermove", follow);
      f.svg.addEventListener("pointerdown", follow);
      f.svg.addEventListener("pointerleave", hide);
      f.svg.addEventListener("blur", hide);
      f.svg.addEventListener("keydown", (event) => {
        const move = {ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity}[event.key];
        if (event.key === "Escape") hide();
        if (move === undefined || !places.length) return;
        event.preventDefault();
        show(Math.min(Math.max(index + move, 0), places.length - 1), null);
      });
    }

    placeTip(f, box, tip, px, top) {
      tip.hidden = false;
      const offset = f.svg.offsetTop || f.svg.getBoundingClientRect().top - box.getBoundingClientRect().top;
      const right = px + 12 + tip.offsetWidth > box.clientWidth;
      tip.style.left = `${Math.max(0, right ? px - tip.offsetWidth - 12 : px + 12)}px`;
      tip.style.top = `${offset + top}px`;
    }

    // The cells of a map: outcomes of a scheme or rate at each depth.
    drawMap(box, panel) {
      const rows = panel.rows.filter((row) => row.kind !== "frontier" && Number.isFinite(row.x));
      const byRate = rows.some((row) => Number.isFinite(row.y));
      const lineOf = (row) => byRate ? row.y : row.series;
      const lines = [...new Set(rows.map(lineOf))];
      if (byRate) lines.sort((a, b) => b - a);
      const columns = [...new Set(rows.map((row) => row.x))].sort((a, b) => a - b);
      const text = (line) => byRate ? shortNumber(line) : line;
      const longest = Math.max(...lines.map((line) => text(line).length), 4);
      const left = Math.min(longest * 7 + 12, 160), high = 26;
      const f = this.frame(box, panel, lines.length * high + 62, {left, right: 8, top: 20, bottom: 36},
        panel.title || panel.name || this.figure.querySelector("h4").textContent);
      const wide = (f.right - f.left) / columns.length;
      lines.forEach((line, i) => {
        const words = text(line), most = Math.floor((left - 8) / 6.6);
        f.svg.append(make("text", {x: left - 6, y: f.top + (i + 0.5) * high + 4, "text-anchor": "end"},
          words.length > most ? words.slice(0, most - 1) + "…" : words, make("title", {}, words)));
      });
      columns.forEach((column, j) => {
        if (wide > 20 || j % Math.ceil(20 / wide) === 0) f.svg.append(make("text", {
          x: f.left + (j + 0.5) * wide, y: f.bottom + 14, "text-anchor": "middle"}, shortNumber(column)));
      });
      this.labelAxes(f, panel);
      const marks = [];
      lines.forEach((line, i) => columns.forEach((column, j) => {
        const cell = rows.filter((row) => lineOf(row) === line && row.x === column);
        const total = cell.reduce((sum, row) => sum + (row.n || 1), 0);
        let at = f.left + j * wide + 1.5;
        const words = cell.map((row) => `${row.n || 1} ${row.kind}` +
          (Number.isFinite(row.value) ? ` (${shortNumber(row.value)} nats from the loss without context)` : ""));
        for (const row of cell) {
          const part = (wide - 3) * (row.n || 1) / total;
          f.svg.append(make("rect", {x: at, y: f.top + i * high + 1.5, width: part, height: high - 3,
            fill: this.kindColour(row.kind)}));
          at += part;
        }
        if (cell.length) marks.push({px: f.left + (j + 0.5) * wide, py: f.top + i * high, words:
          [`${text(line)}, ${clean(panel.x || "x")} ${shortNumber(column)}`, ...words.map(clean)],
          holds: (a, b) => a >= f.left + j * wide && a < f.left + (j + 1) * wide &&
            b >= f.top + i * high && b < f.top + (i + 1) * high});
      }));
      for (const row of panel.rows.filter((r) => r.kind === "frontier" && r.mark !== "none")) {
        const i = lines.indexOf(row.y), j = columns.indexOf(row.x);
        if (i >= 0 && j >= 0) f.svg.append(make("line", {x1: f.left + j * wide, class: "axis",
          x2: f.left + (j + 1) * wide, y1: f.top + i * high, y2: f.top + i * high, "stroke-width": 3}));
      }
      this.addCellHover(f, box, marks);
    }

    addCellHover(f, box, marks) {
      const tip = make("div", {class: "tip", hidden: ""});
      const voice = make("div", {class: "unseen", "aria-live": "polite"});
      box.append(tip, voice);
      let index = -1;
      const show = (mark) => {
        tip.replaceChildren(make("b", {}, mark.words[0]),
          ...mark.words.slice(1).map((words) => make("div", {}, words)));
        this.placeTip(f, box, tip, mark.px, mark.py + 28);
      };
      const follow = (event) => {
        const where = f.svg.getBoundingClientRect();
        const mark = typeof marks === "function" ? marks(event.clientX - where.left, event.clientY - where.top)
          : marks.find((m) => m.holds(event.clientX - where.left, event.clientY - where.top));
        if (mark) show(mark); else tip.hidden = true;
      };
      f.svg.addEventListener("pointermove", follow);
      f.svg.addEventListener("pointerdown", follow);
      f.svg.addEventListener("pointerleave", () => { tip.hidden = true; });
      f.svg.addEventListener("blur", () => { tip.hidden = true; });
      f.svg.addEventListener("keydown", (event) => {
        const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
        if (event.key === "Escape") tip.hidden = true;
        if (!move || typeof marks === "function" || !marks.length) return;
        event.preventDefault();
        index = Math.min(Math.max(index + move, 0), marks.length - 1);
        show(marks[index]);
        voice.textContent = tip.textContent;
      });
    }

    // Layers against steps: a picture of one pixel a cell, stretched.
    drawHeat(box, panel) {
      const rows = panel.rows, steps = [...new Set(rows.map((r) => r.x))].sort((a, b) => a - b);
      const depth = Math.max(...rows.map((r) => r.y));
      const values = new Map(rows.map((r) => [`${r.x},${r.y}`, r.value]));
      const scale = panel.scale;
      const finite = rows.map((r) => r.value).filter((v) => Number.isFinite(v) && (!scale.log || v > 0));
      const low = scale.low ?? Math.min(...finite), high = scale.high ?? Math.max(...finite);
      const level = (v) => scale.log ? Math.log(v / low) / (Math.log(high / low) || 1)
        : (v - low) / (high - low || 1);
      const f = this.frame(box, panel, 250, {left: 44, right: 8, top: 20, bottom: 36},
        panel.title || panel.name);
      const canvas = make("canvas", {width: steps.length, height: depth});
      const paint = canvas.getContext("2d"), image = paint.createImageData(steps.length, depth);
      steps.forEach((step, i) => {
        for (let layer = 1; layer <= depth; layer++) {
          const v = values.get(`${step},${layer}`), at = 4 * ((depth - layer) * steps.length + i);
          const known = Number.isFinite(v) && (!scale.log || v > 0);
          image.data.set([...(known ? viridis(level(v)) : [200, 200, 200]), 255], at);
        }
      });
      paint.putImageData(image, 0, 0);
      const picture = document.createElementNS(SVG, "image");
      const place = {x: f.left, y: f.top, width: f.right - f.left, height: f.bottom - f.top,
        preserveAspectRatio: "none", href: canvas.toDataURL()};
      for (const [name, value] of Object.entries(place)) picture.setAttribute(name, value);
      picture.style.imageRendering = "pixelated";
      f.svg.append(picture);
      const wide = (f.right - f.left) / steps.length, high1 = (f.bottom - f.top) / depth;
      const every = Math.ceil(steps.length / 6);
      steps.forEach((step, i) => { if (i % every === 0) f.svg.append(make("text",
        {x: f.left + (i + 0.5) * wide, y: f.bottom + 14, "text-anchor": "middle"}, String(step))); });
      for (const layer of new Set([1, Math.ceil(depth / 2), depth])) f.svg.append(make("text",
        {x: f.left - 5, y: f.bottom - (layer - 0.5) * high1 + 4, "text-anchor": "end"}, String(layer)));
      this.labelAxes(f, panel);
      const ramp = make("div", {class: "ramp"});
      ramp.style.background = `linear-gradient(to right, ${VIRIDIS.join(",")})`;
      const log = scale.log ? ", logarithmic" : "";
      box.append(ramp, make("div", {class: "grey"},
        clean(`${scale.label || "value"}: ${shortNumber(low)} to ${shortNumber(high)}${log}`)));
      this.addCellHover(f, box, (a, b) => {
        const i = Math.floor((a - f.left) / wide), layer = Math.ceil((f.bottom - b) / high1);
        if (i < 0 || i >= steps.length || layer < 1 || layer > depth) return null;
        const v = values.get(`${steps[i]},${layer}`);
        return {px: a, py: Math.min(b, f.bottom - 60) - 20, words: [`step ${steps[i]}, layer ${layer}`, shortNumber(v)]};
      });
    }
  }

  // --- the page ------------------------------------------------------------------------------

  function followScroll(bar) {
    const links = all(bar, "a");
    const targets = links.map((a) => document.getElementById(a.hash.slice(1)));
    const mark = () => {
      let current = 0;
      targets.forEach((node, i) => { if (node && node.getBoundingClientRect().top < 90) current = i; });
      links.forEach((a, i) => i === current ? a.setAttribute("aria-current", "true")
        : a.removeAttribute("aria-current"));
    };
    addEventListener("scroll", mark, {passive: true});
    mark();
  }

  // The page of a server asks for the tag of the newest page and loads that.
  function followServer(bar) {
    const note = make("span", {class: "live grey", role: "status"}, "live");
    bar.append(note);
    let tag = null;
    setInterval(async () => {
      try {
        const answer = await fetch(location.pathname, {method: "HEAD", cache: "no-store"});
        const newest = answer.headers.get("ETag");
        note.textContent = "live";
        if (tag && newest !== tag && !document.hidden) location.reload();
        tag = tag || newest;
      } catch { note.textContent = "server stopped"; }
    }, 3000);
  }

  function start() {
    const theme = store(local, "deepstack-theme");
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    const bar = document.getElementById("bar");
    bar.append(themeButton);
    themeButton.addEventListener("click", changeTheme);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
    showTheme();
    all(document, "table").forEach((table, number) => addTools(table, number));
    const panels = JSON.parse(document.getElementById("panels").textContent);
    // Charts are drawn when they come near the screen: many points take time.
    const watcher = new IntersectionObserver((entries) => {
      for (const {target, isIntersecting} of entries) if (isIntersecting) {
        watcher.unobserve(target);
        if (Object.hasOwn(panels, target.id)) new Figure(target, panels[target.id]);
      }
    }, {rootMargin: "600px"});
    all(document, "figure").forEach((figure) => watcher.observe(figure));
    followScroll(bar);
    if (document.body.dataset.live !== undefined) followServer(bar);
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => redraws.forEach((draw) => draw()), 150);
    });
    addEventListener("beforeprint", () => all(document, "details").forEach((d) => { d.open = true; }));
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "/") {
        const fields = all(document, "input[type=search]").filter((field) => field.offsetParent);
        const below = fields.find((field) => field.getBoundingClientRect().top > 0) || fields[0];
        if (below) { event.preventDefault(); below.focus(); }
      } else if (event.key === "d") changeTheme();
    });
  }
  start();
})();
