// The page is complete without scripts: they add sorting, filters and charts with values.
const FEW_ROWS = 6;

// --- theme ---------------------------------------------------------------------------------

const themeButton = make("button", {type: "button", id: "theme", title: "Light or dark (key: d)"});
const figures = [];

function showTheme() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} mode`);
  figures.forEach((figure) => figure.draw());
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

// Add the charts of a newer page of the same runs; return whether there are more to come, or were.
function addCharts(newer) {
  if (!document.querySelector(".drawing") || document.body.dataset.live !== newer.body.dataset.live) return false;
  const take = (id) => document.adoptNode(newer.getElementById(id));
  document.getElementById("panels").replaceWith(take("panels"));
  for (const {id} of all(document, ".contents, .finding, .drawing")) document.getElementById(id).replaceWith(take(id));
  all(document, ".finding table").forEach((table) => addTools(table, "finding"));
  for (const {id} of all(newer, "figure")) if (!document.getElementById(id)) {
    document.getElementById(id.replace(/-.*/, "-figures")).append(take(id));
    watcher.observe(document.getElementById(id));
  }
  return true;
}

// The page of a server asks for the present states and the tag of the newest page, and takes its
// charts, or loads it.
function followServer(bar) {
  const note = make("span", {class: "live grey", role: "status"}, "live");
  bar.append(note);
  let tag = `"${document.body.dataset.tag}"`, asking = false;
  setInterval(async () => {
    if (asking) return;  // two answers with the last charts would load the page again
    asking = true;
    try {
      const ask = (method) => fetch(location.pathname, {method, cache: "no-store"});
      const {headers} = await ask("HEAD"), newest = headers.get("ETag");
      const states = JSON.parse(headers.get("X-States") || "{}");
      for (const span of all(document, ".states")) {
        const text = states[span.dataset.study];
        if (text && text !== span.textContent) span.textContent = text;
      }
      note.textContent = "live";
      if (newest !== tag && !document.hidden) {
        const answer = await ask("GET"), text = await answer.text();
        if (!addCharts(new DOMParser().parseFromString(text, "text/html"))) location.reload();
        tag = answer.headers.get("ETag");
      }
    } catch { note.textContent = "server stopped"; }
    asking = false;
  }, 1000);
}

// Charts are drawn when they come near the screen: many points take time.
const watcher = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) if (isIntersecting) {
    watcher.unobserve(target);
    const panels = JSON.parse(document.getElementById("panels").textContent);
    if (Object.hasOwn(panels, target.id)) figures.push(new Figure(target, panels[target.id]));
  }
}, {rootMargin: "600px"});

function start() {
  const theme = store(local, "deepstack-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  const bar = document.getElementById("bar");
  bar.append(themeButton);
  themeButton.addEventListener("click", changeTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();
  all(document, "table").forEach((table, number) => addTools(table, number));
  all(document, "figure").forEach((figure) => watcher.observe(figure));
  followScroll(bar);
  if (document.body.dataset.live !== undefined) followServer(bar);
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => figures.forEach((figure) => figure.draw()), 150);
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
