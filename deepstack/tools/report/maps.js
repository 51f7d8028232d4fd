// The contents of a panel of boxes: outcomes of a scheme or rate at each depth, or layers against steps.
const LINE = 26;

function cellsOf({shape, colours}, {rows: all, scale, x}) {
  const isHeat = shape === "heat";
  const rows = all.filter((row) => row.kind !== "frontier" && Number.isFinite(row.x));
  const byValue = rows.some((row) => Number.isFinite(row.y)), lineOf = (row) => byValue ? row.y : row.series;
  const lines = byValue ? ascending(rows.map(lineOf)) : unique(rows.map(lineOf)).reverse();
  const names = lines.map((line) => byValue ? shortNumber(line) : clean(line));
  const columns = ascending(rows.map((row) => row.x));
  const [column, line] = [columns, lines].map((values) => new Map(values.map((value, i) => [value, i])));
  const cells = new Map();
  for (const row of rows) {
    const cell = column.get(row.x) + columns.length * line.get(lineOf(row));
    cells.set(cell, [...(cells.get(cell) || []), row]);
  }
  const level = scale.log ? Math.log : Number, low = level(scale.low), high = level(scale.high);
  const shareOf = (value) => Math.min(Math.max((level(value) - low) / (high - low || 1), 0), 1);
  const colourOf = ({value, kind}) => {
    if (!isHeat) return readable(colours[kind]);
    const last = scale.colours.length - 1;
    return isKnown(value, scale.log) ? scale.colours[Math.round(shareOf(value) * last)] : "#c8c8c8";
  };
  const paint = (u) => {
    const at = (j, i) => [u.valToPos(j - 0.5, "x", true), u.valToPos(i + 0.5, "y", true)];
    const wide = at(1, 0)[0] - at(0, 0)[0], tall = at(0, 0)[1] - at(0, 1)[1], gap = isHeat ? -0.3 : 1.5;
    for (const [cell, parts] of cells) {
      const total = parts.reduce((sum, row) => sum + (row.n || 1), 0);
      let [left, top] = at(cell % columns.length, Math.floor(cell / columns.length));
      for (const row of parts) {
        u.ctx.fillStyle = colourOf(row);
        u.ctx.fillRect(left + gap, top + gap, wide * (row.n || 1) / total - 2 * gap, tall - 2 * gap);
        left += wide * (row.n || 1) / total;
      }
    }
    u.ctx.fillStyle = css("ink");
    for (const row of all) if (row.kind === "frontier" && row.mark !== "none")
      u.ctx.fillRect(...at(column.get(row.x), line.get(row.y)), wide, 3);
  };
  const textOf = ({n, kind, value}) => isHeat ? shortNumber(value) : clean(`${n || 1} ${kind}`) +
    (Number.isFinite(value) ? ` (${shortNumber(value)} nats from the loss without context)` : "");
  const values = (u) => {
    const j = Math.round(u.posToVal(u.cursor.left, "x")), i = Math.round(u.posToVal(u.cursor.top, "y"));
    const parts = cells.get(j + columns.length * i);
    const head = `${isHeat ? "layer " : ""}${names[i]}, ${clean(x) || "x"} ${shortNumber(columns[j])}`;
    return parts ? [head, ...parts.map((row) => make("div", {}, textOf(row)))] : [];
  };
  const places = columns.map((_, j) => j);
  return {curves: [], places, names: {x: columns.map(shortNumber), y: names}, values, draw: [paint],
    data: [places], x: [-0.5, columns.length - 0.5], whole: () => [-0.5, lines.length - 0.5],
    height: isHeat ? HEIGHT : lines.length * LINE + 50};
}
