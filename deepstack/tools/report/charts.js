// Draws the charts of the page with uPlot, from their CSV and the description by figures.py.
const TIP_ROWS = 6, FEW_INTERVALS = 3, FEW_TICKS = 8, FEW_POINTS = 24, NEAR = 6, HEIGHT = 250;

const ring = (x, y, r) => new Path2D(`M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`);

class Figure {
  constructor(figure, description) {
    Object.assign(this, description, {figure, off: new Set(), plots: [], flipped: {}});
    const rows = readRows(figure.querySelector("figcaption a"), description.words);
    const isOf = (panel) => (row) => row.panel === panel.name && row.kind !== "fit" &&
      [...panel.kinds, "level", "reference", "frontier"].includes(row.kind);
    for (const panel of this.panels) panel.rows = rows.filter(isOf(panel));
    this.isLines = this.shape === "lines";
    const isDrawn = (row) => Number.isFinite(row.x) && (!this.isLines || Number.isFinite(row.y));
    if (this.panels.some((panel) => panel.rows.some(isDrawn))) this.build();
  }

  isLog(panel, axis) { return this.isLines && panel[`log_${axis}`] !== Boolean(this.flipped[axis]); }

  build() {
    const image = this.figure.querySelector("img"), tools = make("div", {class: "tools"});
    this.holder = make("div", {class: "panels"});
    this.legend = make("div", {class: "legend", role: "group", "aria-label": "Series"});
    const button = (kind, title, words, act) => {
      const node = make("button", {type: "button", class: kind, title}, words());
      node.addEventListener("click", () => { act(node); node.textContent = words(); });
      tools.append(node);
    };
    const scale = (axis) => (panel) => this.isLog(panel, axis) ? "log" : "linear";
    if (this.isLines) for (const axis of ["x", "y"]) button(`scale-${axis}`, "Logarithmic or linear scale",
      () => `${axis}: ${unique(this.panels.map(scale(axis))).join(", ")}`,
      () => { this.flipped[axis] = !this.flipped[axis]; this.draw(); });
    const zooms = this.shape === "map" ? [] : [["+", "Zoom in"], ["-", "Zoom out"], ["0", "Show all"]];
    for (const [key, words] of zooms)
      button("zoom", `Key: ${key}. A drag zooms too, and a double click shows all.`, () => words,
        () => this.plots.forEach((u) => u.press(key)));
    button("paper", "The figure as plot draws it", () => "Printed figure", (node) => {
      this.holder.hidden = this.legend.hidden = image.hidden;
      image.hidden = !image.hidden;
      node.setAttribute("aria-pressed", String(!image.hidden));
      this.draw();
    });
    image.before(tools, this.legend, this.holder);
    image.hidden = true;
    this.draw();
  }

  draw() {
    if (!this.holder || this.holder.hidden) return;
    this.plots.splice(0).forEach((u) => u.destroy());
    this.drawLegend();
    const boxes = this.panels.map(({heading, y}) => make("div", {class: "panel"}, ...(heading ?
      [make("h5", {}, clean(heading))] : []), make("div", {class: "grey"}, clean(y) || "\u00a0")));
    this.holder.replaceChildren(...boxes);  // all of them first: their number settles their width
    this.plots = this.panels.map((panel, i) =>
      this.plot(boxes[i], panel, this.isLines ? this.linesOf(panel) : cellsOf(this, panel)));
  }

  drawLegend() {
    const series = this.series.filter(([name]) => name), names = series.map(([name]) => name);
    const show = (isOff) => {
      this.off = new Set(names.filter(isOff));
      whole.hidden = !this.off.size;
      buttons.forEach((node, i) => node.setAttribute("aria-pressed", String(!this.off.has(names[i]))));
      for (const u of this.plots) u.batch(() => {
        u.curves.forEach((curve, i) => u.setSeries(i + 1, {show: !this.off.has(curve.series)}));
        u.setScale("y", {min: null, max: null});
      });
    };
    const whole = make("button", {type: "button"}, "All series");
    whole.hidden = !this.off.size;
    whole.addEventListener("click", () => show(() => false));
    const buttons = series.map(([name, style]) => {
      const node = make("button", {type: "button", "aria-pressed": String(!this.off.has(name)),
        title: "Click: on or off. Double click: only this one."}, keyOf(style), clean(name));
      node.addEventListener("click", () => show((other) => this.off.has(other) !== (other === name)));
      node.addEventListener("dblclick", () => show((other) => other !== name));
      return node;
    });
    this.legend.replaceChildren(...buttons, whole, ...this.keys.map(([text, style, kind]) =>
      make("span", {class: kind}, keyOf(style), clean(text))));
    this.legend.hidden = names.length < 2 && !this.keys.length;
  }

  // The contents of a panel of lines: its curves, each a series of uPlot, and how they are painted.
  linesOf(panel) {
    const [logX, logY] = ["x", "y"].map((axis) => this.isLog(panel, axis)), curves = [];
    const rows = panel.rows.filter((row) => isKnown(row.x, logX));
    for (const row of rows) {  // a series is several curves where x begins again
      const [colour, dash, hollow, bars] = panel.styles[row.kind][row.series];
      const isApart = row.kind === "point" && row.mark === "diverged";  // no line leads to it
      const kind = row.kind === "best" ? "point" : row.kind;  // a point with a ring
      const last = curves.findLast((one) => one.isApart === isApart);
      const isSame = last?.series === row.series && last.kind === kind && last.points.at(-1).x < row.x;
      if (isSame) last.points.push(row);
      else curves.push({series: row.series, kind, isApart, points: [row], hollow, bars,
        colour: readable(colour), dash: isApart || row.kind === "reference" ? null : dash});
    }
    const places = ascending(rows.map((row) => row.x));
    for (const curve of curves) curve.at = new Map(curve.points.map((row) => [row.x, row]));
    const valueOf = (row) => row && (isKnown(row.y, logY) ? row.y : null);
    const data = curves.map(({at}) => places.map((x) => valueOf(at.get(x))));  // null: a gap in the line
    const isOn = (row) => !this.off.has(row.series) && isKnown(row.y, logY) && !(row.x <= 0 && logX);
    // Panels with one scale of values in the figure have one here; long bars do not widen it.
    const whole = () => limitsOf(this.panels.filter((other) => other.share === panel.share)
      .flatMap((other) => other.rows.filter(isOn))
      .flatMap((row) => [row.y, row.high, logY ? Math.max(row.low, row.y / 3) : row.low]), logY);
    const values = (u) => {
      const {idx, idxs, top} = u.cursor, far = (row) => u.byKey ? 0 : Math.abs(u.valToPos(row.y, "y") - top);
      const near = curves.map(({at}, i) => u.series[i + 1].show && at.get(places[idxs[i + 1]])).filter(Boolean)
        .sort((a, b) => far(a) - far(b));
      const shown = near.slice(0, TIP_ROWS), [nearest] = shown;
      const lines = shown.sort((a, b) => b.y - a.y).map((row) => {
        const isLong = shown.length <= FEW_INTERVALS || row === nearest, style = panel.styles[row.kind][row.series];
        return make("div", {class: row === nearest && !u.byKey ? "near" : ""}, keyOf(style),
          `${clean(row.series) || "value"} ${shortNumber(row.y)}`,
          isLong && Number.isFinite(row.low + row.high)
            ? ` (${shortNumber(row.low)} to ${shortNumber(row.high)}, n = ${row.n})` : "",
          row.x === places[idx] ? "" : ` at ${shortNumber(row.x)}`, row.mark ? `, ${clean(row.mark)}` : "");
      });
      if (near.length > shown.length) lines.push(make("div", {}, `and ${near.length - shown.length} more`));
      return lines.length ? [`${clean(panel.x) || "x"} ${shortNumber(places[idx])}`, ...lines] : [];
    };
    const levels = panel.rows.filter((row) => isKnown(row.y, logY) && !Number.isFinite(row.x));
    return {curves, places, logX, logY, whole, values, data: [places, ...data], height: HEIGHT, x: limitsOf(places, logX),
      draw: [(u) => this.paintLevels(u, levels.filter(isOn), panel)],
      drawSeries: [(u, i) => this.paintCurve(u, curves[i - 1], logY)]};
  }

  paintCurve(u, {points, colour, dash, hollow, bars}, logY) {
    const {ctx, bbox} = u, ratio = uPlot.pxRatio, edge = 5 * ratio;
    const at = (row, v) => [u.valToPos(row.x, "x", true), logY && v <= 0 ? 1e5 : u.valToPos(v, "y", true)];
    const spread = points.filter((row) => Number.isFinite(row.low + row.high));
    const isBand = spread.length > 1 && !bars, path = new Path2D(), inside = new Path2D();
    for (const row of spread) {
      if (!isBand) path.moveTo(...at(row, row.low));
      path.lineTo(...at(row, row.high));
    }
    if (isBand) for (const row of spread.reverse()) path.lineTo(...at(row, row.low));
    ctx.save();
    inside.rect(bbox.left - edge, bbox.top - edge, bbox.width + 2 * edge, bbox.height + edge);
    ctx.clip(inside);
    ctx.setLineDash([]);
    Object.assign(ctx, {fillStyle: colour, strokeStyle: colour, lineWidth: 1.3 * ratio});
    ctx.globalAlpha = isBand ? 0.16 : 1;
    ctx[isBand ? "fill" : "stroke"](path);
    ctx.globalAlpha = 1;
    if (points.length <= FEW_POINTS || dash === null) for (const row of points) if (isKnown(row.y, logY)) {
      const circle = ring(...at(row, row.y), 3.2 * ratio);
      ctx.fillStyle = row.mark || hollow ? css("paper") : colour;
      ctx.fill(circle);
      if (row.kind === "best") circle.addPath(ring(...at(row, row.y), 6.5 * ratio));
      ctx.stroke(circle);
    }
    ctx.restore();
  }

  paintLevels(u, levels, panel) {  // with their names, where there is room
    const {ctx, bbox: {left, top, width, height}} = u, taken = [], ratio = uPlot.pxRatio;
    ctx.save();
    Object.assign(ctx, {font: `${10 * ratio}px system-ui`, textAlign: "right", textBaseline: "bottom"});
    for (const row of levels) {
      const [colour, dash] = panel.styles[row.kind][row.series], y = u.valToPos(row.y, "y", true);
      if (y < top || y > top + height) continue;
      const name = [clean(row.series), left + width - 3, y - 2 * ratio, width - 6];
      Object.assign(ctx, {strokeStyle: readable(colour), fillStyle: readable(colour), lineWidth: 1.2 * ratio});
      ctx.setLineDash(dashOf(dash, ratio));
      ctx.stroke(new Path2D(`M${left} ${y}h${width}`));
      if (!taken.every((other) => Math.abs(other - y) > 13 * ratio)) continue;
      taken.push(y);
      ctx.setLineDash([]);
      Object.assign(ctx, {strokeStyle: css("paper"), lineWidth: 3 * ratio}).strokeText(...name);
      ctx.fillText(...name);
    }
    ctx.restore();
  }

  plot(box, panel, {curves, places, names, logX, logY, x, whole, values, height, data, draw, drawSeries}) {
    let isZoomed = false;
    const ranges = [(u, low, high) => {
      isZoomed = low > places[0] || high < places.at(-1);
      return isZoomed ? [Math.max(low, x[0]), Math.min(high, x[1])] : x;
    }, (u, low, high) => isZoomed && curves.length && low !== null ? limitsOf([low, high], logY) : whole()];
    const textOf = (key, v) => names ? names[key][v] : shortNumber(v);
    const axis = (key, log, own, size) => ({scale: key, size, stroke: css("ink"), font: "11px system-ui",
      border: {show: !names, stroke: css("grey"), width: 1}, grid: {show: !names, stroke: css("grid"), width: 1},
      ticks: {show: false}, space: key === "x" ? 44 : 30, values: (u, ticks) => ticks.map((v) => textOf(key, v)),
      ...((own || log) && {filter: (u, ticks) => ticks, splits: (u, i, low, high) => {
        const ticks = (own || decades(low, high)).filter((v) => v >= low && v <= high);
        const room = key === "y" ? 18 : Math.max(...ticks.map((v) => textOf(key, v).length)) * 6.5 + 8;
        const at = (v) => u.valToPos(v, key), isFree = (v, last) => Math.abs(at(v) - at(last)) >= room;
        return ticks.reduce((taken, v) => !taken.length || isFree(v, taken.at(-1)) ? [...taken, v] : taken, []);
      }})});
    const left = names ? Math.min(Math.max(...names.y.map((name) => name.length)) * 6.6 + 12, 160) : 54;
    const u = new uPlot({width: box.clientWidth, height, legend: {show: false}, pxAlign: 0, padding: [8, 12, 0, 0],
      scales: {x: {time: false, distr: logX ? 3 : 1, range: ranges[0]}, y: {distr: logY ? 3 : 1, range: ranges[1]}},
      axes: [{...axis("x", logX, names || places.length <= FEW_TICKS ? places : null, 22), label: clean(panel.x),
        labelSize: 16, labelFont: "11px system-ui"}, axis("y", logY, names && [...names.y.keys()], left)],
      series: [{}, ...curves.map(({series, colour, dash}) => ({stroke: colour, width: dash === null ? 0 : 1.6,
        dash: dashOf(dash, uPlot.pxRatio), points: {show: false}, show: !this.off.has(series)}))],
      cursor: {y: Boolean(names), drag: {x: true, y: true, uni: 30, dist: 5}, hover: {skip: [null],
        prox: (u, i, idx) => NEAR + Math.abs(u.cursor.left - u.valToPos(places[idx], "x"))}},
      hooks: {draw, drawSeries, setCursor: [() => tell()]}}, data, box);
    const {over} = u, tip = make("div", {class: "tip", hidden: ""});
    const voice = make("div", {class: "unseen", "aria-live": "polite"});
    const label = clean(panel.heading || this.figure.querySelector("h4").textContent);
    for (const [name, value] of Object.entries({tabindex: "0", role: "img", "aria-label":
      `${label}. Arrow keys show values; + and - zoom, 0 shows all.`})) over.setAttribute(name, value);
    over.append(tip);
    box.append(voice);
    const tell = () => {
      const {left: at, idx} = u.cursor, [head, ...lines] = at >= 0 && idx !== null ? values(u) : [];
      tip.hidden = !head;
      if (head) tip.replaceChildren(make("b", {}, head), ...lines);
      voice.textContent = head && u.byKey ? tip.textContent : "";
      const size = tip.offsetWidth + 12, isRight = at + size <= over.clientWidth, isLeft = at - size >= -left;
      const side = isRight ? at + 12 : isLeft ? at - size : Math.min(0, over.clientWidth - size);
      Object.assign(tip.style, {left: `${side}px`, top: isRight || isLeft ? 0 : "calc(100% + 1.6rem)"});
    };
    u.press = (key) => {
      const {cursor} = u, size = over.clientWidth, middle = cursor.left >= 0 ? cursor.left : size / 2;
      const to = (px) => u.posToVal(px, "x"), factor = {"+": 0.5, "-": 2}[key];
      if (factor) u.setScale("x", {min: to(middle * (1 - factor)), max: to(middle + (size - middle) * factor)});
      if (key === "0") u.setScale("x", {min: x[0], max: x[1]});
      if (key === "Escape") u.setCursor({left: -1, top: -1});
      const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowUp: 0, ArrowDown: 0, Home: -Infinity, End: Infinity};
      const move = moves[key];
      u.byKey = move !== undefined && places.length > 0;
      if (!u.byKey) return Boolean(factor) || key === "0";
      const inside = (i, last) => Math.min(Math.max(i, 0), last), {left: was, top, idx} = cursor;
      const first = move < 0 ? places.length - 1 : 0;
      const place = places[was < 0 ? first : inside(idx + move, places.length - 1)];
      const line = Math.round(u.posToVal(Math.max(top, 0), "y")) + ({ArrowUp: 1, ArrowDown: -1}[key] || 0);
      const at = () => u.valToPos(place, "x");
      if (at() < 0 || at() > size)  // a zoomed panel follows the pointer
        u.batch(() => u.setScale("x", {min: to(at() - size / 2), max: to(at() + size / 2)}));
      u.setCursor({left: at(), top: names ? u.valToPos(inside(line, names.y.length - 1), "y") : 0});
      return true;
    };
    over.addEventListener("keydown", (event) => u.press(event.key) && event.preventDefault());
    const follow = ({pointerType, offsetX, offsetY}) => {
      u.byKey = false;
      if (pointerType === "touch") u.setCursor({left: offsetX, top: offsetY});
    };
    for (const kind of ["pointerdown", "pointermove"]) over.addEventListener(kind, follow);
    over.addEventListener("blur", () => u.press("Escape"));
    box.chart = Object.assign(u, {curves});
    return u;
  }
}
