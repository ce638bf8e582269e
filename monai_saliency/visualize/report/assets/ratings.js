// Ratings of cases (good, doubtful, wrong, and a comment), which stay in this browser and can be exported.
"use strict";

// The report's own folder, so that two reports do not share ratings.
const root = location.pathname.replace(/(cases\/)?[^/]*$/, "");

/** Browser storage under a key; without one, such as in private windows, nothing is remembered. */
const store = {
  get(key) {
    try { return localStorage.getItem(`monai-saliency ${key}`); } catch { return null; }
  },
  set(key, value) {
    try { localStorage.setItem(`monai-saliency ${key}`, value); } catch { /* not remembered */ }
  },
};

const ratings = () => JSON.parse(store.get(`ratings ${root}`) ?? "{}");

function rate(name, rating, comment) {
  const all = ratings();
  if (rating || comment) all[name] = { rating, comment, date: new Date().toISOString() };
  else delete all[name];
  store.set(`ratings ${root}`, JSON.stringify(all));
}

/** A cell of a CSV file; a spreadsheet must not run it as a formula. */
const csvCell = (text) => `"${(/^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

document.getElementById("export")?.addEventListener("click", () => {
  const lines = Object.entries(ratings()).sort().map(([name, each]) => [name, each.rating, each.comment, each.date]);
  const text = [["case", "rating", "comment", "date"], ...lines].map((line) => line.map(csvCell).join(",")).join("\r\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${text}\r\n`], { type: "text/csv" }));
  link.download = "ratings.csv";
  link.click();
});
