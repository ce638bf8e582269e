// The cohort's table: sorting by a heading, and choosing rows.
"use strict";

const body = document.querySelector("#cases tbody");
const lines = [...body.rows];
const controls = ["search", "kind", "class"].map((id) => document.getElementById(id));
const columns = document.getElementById("columns"); // none where the table shows all

// Filters and order are in the address, so that "Back" and a copied link bring them back.
const asked = new URLSearchParams(location.hash.slice(1));
for (const control of controls) control.value = asked.get(control.id) ?? "";
let order = asked.get("sort") ?? "";
if (columns !== null) columns.checked = asked.has("columns");

function remember() {
  const found = controls.map((control) => [control.id, control.value]).concat([["sort", order], ["columns", columns?.checked ? "all" : ""]]);
  const words = new URLSearchParams(found.filter(([, value]) => value)).toString();
  history.replaceState(null, "", `#${words}`);
  store.set(`filters ${root}`, words);
}

function choose() {
  const [search, kind, of] = controls.map((control) => control.value);
  const wanted = search.trim().toLowerCase();
  let count = 0;
  for (const line of lines) {
    const isShown = line.textContent.toLowerCase().includes(wanted)
      && (!kind || line.dataset.kind.split(" ").includes(kind))
      && (!of || line.dataset.class === of);
    line.hidden = !isShown;
    count += isShown ? 1 : 0;
  }
  document.getElementById("cases").classList.toggle("all", columns === null || columns.checked);
  document.getElementById("count").textContent = `${count} of ${lines.length} rows`;
  remember();
}

/** What a row is sorted by: a number where the cell has one, else its text; null where there is neither. */
function keyOf(line, column) {
  const cell = line.cells[column];
  if (!cell || cell.colSpan > 1) return null;
  const value = cell.dataset.value ?? cell.textContent.trim();
  if (value === "") return null;
  return Number.isNaN(Number(value)) ? value : Number(value);
}

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
  return typeof a === "number" ? -1 : 1;
}

function sort(head, isUp = head.getAttribute("aria-sort") !== "ascending") {
  order = `${isUp ? "" : "-"}${head.dataset.column}`;
  for (const each of head.parentElement.cells) each.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
  const keyed = lines.map((line, place) => ({ line, place, key: keyOf(line, head.cellIndex) }));
  keyed.sort((a, b) => {
    // What has no value stands last either way.
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
    return (isUp ? 1 : -1) * compare(a.key, b.key) || a.place - b.place;
  });
  body.append(...keyed.map(({ line }) => line));
}

for (const button of document.querySelectorAll("#cases th button")) {
  button.addEventListener("click", () => {
    sort(button.parentElement);
    remember();
  });
}
for (const control of [...controls, columns]) control?.addEventListener("input", choose);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
const sorted = document.querySelector(`#cases th[data-column="${CSS.escape(order.replace(/^-/, ""))}"]`);
if (sorted !== null) sort(sorted, !order.startsWith("-"));
choose();

function showRatings() {
  const all = ratings();
  for (const badge of document.querySelectorAll("[data-rating]")) {
    const { rating, comment } = all[badge.dataset.rating] ?? {};
    badge.textContent = rating || (comment ? "comment" : "");
    badge.title = comment ?? "";
  }
}
showRatings();
globalThis.addEventListener("pageshow", showRatings);
