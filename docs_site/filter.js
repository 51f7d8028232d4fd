/* Lets the reader choose rows of the table after each .filter by the text of its columns. */
"use strict";
for (const filter of document.querySelectorAll(".filter")) {
  let table = filter.nextElementSibling;
  while (!table.matches("table, :has(table)")) table = table.nextElementSibling;
  const rows = [...table.querySelectorAll("tbody tr")];
  const text = (row, at) => row.cells[at].textContent.trim();
  const choices = [...filter.querySelectorAll("select")];
  const word = filter.querySelector("input");
  for (const choice of choices) {
    const at = Number(choice.dataset.column);
    const counts = new Map();
    for (const row of rows) counts.set(text(row, at), (counts.get(text(row, at)) ?? 0) + 1);
    for (const [name, count] of [...counts].sort()) choice.add(new Option(`${name} (${count})`, name));
  }
  const show = () => {
    for (const row of rows) {
      row.hidden = !row.textContent.toLowerCase().includes(word.value.toLowerCase())
        || choices.some((c) => c.value && text(row, Number(c.dataset.column)) !== c.value);
    }
    const shown = rows.filter((row) => !row.hidden).length;
    filter.querySelector("output").textContent = `${shown} of ${rows.length} entries`;
  };
  filter.addEventListener("input", show);
  filter.hidden = false;
  show();
}
