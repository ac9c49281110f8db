"use strict";
// A pointer on a point asks what it is; the points of the same set stay, the others fade.
const tip = document.getElementById("tip");
for (const drawing of document.querySelectorAll("svg.figure")) {
  drawing.addEventListener("pointermove", (event) => {
    const point = event.target.closest("[data-tip]");
    drawing.classList.toggle("asked", point !== null);
    drawing.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
    tip.hidden = point === null;
    if (point === null) return;
    point.parentElement.querySelectorAll("[data-tip]").forEach((other) => other.classList.add("same"));
    tip.textContent = point.dataset.tip;
    const left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(left, 0)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  });
  drawing.addEventListener("pointerleave", () => {
    drawing.classList.remove("asked");
    tip.hidden = true;
  });
}
// What a cell is worth among those of its column: a number, an infinite one, or parts of a text.
const UNITS = { "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, B: 1, kB: 1e3, MB: 1e6, GB: 1e9,
                KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const NUMBER = /^(?:median )?([-+]?\d*\.?\d+(?:e[-+]?\d+)?) ?%?$/i;
const MEASURED = /([\d.]+) ?([µa-zA-Z]+)/g;
const MISSING = ["", "-", "base"];
const MISSED = /^(?:not reached|infinite|missed \d+ of \d+)$/;
function worth(text) {
  const whole = text.trim().replace(/(\d),(?=\d{3})/g, "$1").replace(/[†‡§¶]+$/, "");
  if (MISSING.includes(whole)) return null;
  if (MISSED.test(whole)) return Infinity;
  const value = whole.split(/ ?± | \(/)[0]; // without its spread
  if (NUMBER.test(value)) return Number(value.match(NUMBER)[1]);
  const amounts = [...value.matchAll(MEASURED)];
  if (amounts.length && amounts.map((each) => each[0]).join(" ") === value && amounts.every((each) => each[2] in UNITS)) {
    return amounts.reduce((sum, each) => sum + Number(each[1]) * UNITS[each[2]], 0);
  }
  // Numbers inside a text count as numbers: 1_2 stands before 1_10.
  return whole.split(/(\d+(?:\.\d+)?)/).map((part, n) => (n % 2 ? Number(part) : part));
}
function compare(one, other) {
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  if (typeof one === "number") return one === other ? 0 : one - other;
  for (let n = 0; n < Math.min(one.length, other.length); n += 1) {
    const order = n % 2 ? one[n] - other[n] : one[n].localeCompare(other[n]);
    if (order) return order;
  }
  return one.length - other.length;
}
// What is missing stands last, whichever way is sorted.
function sorted(items, textOf, up) {
  const known = items.map((item) => [item, worth(textOf(item))]);
  known.sort(([, a], [, b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return up ? compare(a, b) : compare(b, a);
  });
  return known.map(([item]) => item);
}
for (const heading of document.querySelectorAll("th")) {
  heading.addEventListener("click", () => {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    heading.parentElement.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = heading.closest("table").tBodies[0];
    const whole = []; // a row with those that belong below it
    for (const row of body.rows) {
      if ("part" in row.dataset && whole.length) whole.at(-1).push(row);
      else whole.push([row]);
    }
    body.append(...sorted(whole, ([row]) => row.cells[heading.cellIndex].textContent, up).flat());
  });
}
// The choices above all tables: a row that is none of them is hidden, a sweep without rows as well.
const form = document.getElementById("filter");
const choices = [...form.querySelectorAll("select")];
const filtered = [...document.querySelectorAll("tr[data-setup]")];
for (const choice of choices) {
  const values = [...new Set(filtered.map((row) => row.dataset[choice.name]))];
  choice.add(new Option("all", ""));
  // The mark of what is missing is a choice like others: runs without a link.
  for (const value of sorted(values, String, true)) choice.add(new Option(value === "-" ? "none" : value, value));
  choice.parentElement.hidden = values.length < 2;
}
form.hidden = false;
function filter() {
  const asked = choices.filter((choice) => choice.value);
  for (const row of filtered) row.hidden = asked.some((choice) => row.dataset[choice.name] !== choice.value);
  for (const part of document.querySelectorAll("details")) {
    const count = part.querySelector(":scope > summary > .count");
    if (count === null) continue;
    const rows = [...part.querySelectorAll("tbody tr")];
    const shown = rows.filter((row) => !row.hidden).length;
    const all = `${rows.length} row${rows.length === 1 ? "" : "s"}`;
    count.textContent = shown < rows.length ? `${shown} of ${all}` : all;
  }
  const sweeps = [...document.querySelectorAll("section.sweep")];
  for (const sweep of sweeps) {
    const rows = [...sweep.querySelectorAll("tr[data-setup]")];
    sweep.hidden = asked.length > 0 && rows.length > 0 && rows.every((row) => row.hidden);
    document.querySelector(`nav a[href="#${CSS.escape(sweep.id)}"]`).parentElement.hidden = sweep.hidden;
  }
  const left = sweeps.filter((sweep) => !sweep.hidden).length;
  form.querySelector("output").textContent = asked.length
    ? `${filtered.filter((row) => !row.hidden).length} of ${filtered.length} rows, in ${left} of ${sweeps.length} sections; answers and figures show all runs`
    : "";
}
form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter)); // after the values are reset
const unfold = document.getElementById("unfold");
unfold.addEventListener("click", () => {
  const open = unfold.getAttribute("aria-pressed") !== "true";
  unfold.setAttribute("aria-pressed", String(open));
  unfold.textContent = open ? "close everything" : "open everything";
  document.querySelectorAll("details:not(.words)").forEach((part) => (part.open = open));
});
filter(); // a browser may have kept what was chosen before
