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
// A heading sorts its table: by numbers where they are, what is unknown last.
const valueOf = (row, n) => {
  const text = row.cells[n].textContent;
  const number = parseFloat(text.replace(/,/g, ""));
  return Number.isNaN(number) ? text : number;
};
const order = (one, other) => {
  if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other);
  return typeof one === "number" ? -1 : 1;
};
for (const heading of document.querySelectorAll("th")) {
  heading.addEventListener("click", () => {
    const body = heading.closest("table").tBodies[0];
    const up = heading.getAttribute("aria-sort") !== "ascending";
    heading.parentElement.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows];
    rows.sort((a, b) => (up ? 1 : -1) * order(valueOf(a, heading.cellIndex), valueOf(b, heading.cellIndex)));
    body.append(...rows);
  });
}
