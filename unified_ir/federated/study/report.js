// Shows the title of the nearest mark under the pointer, and the same device in every chart.
"use strict";
const NEAR = 28; // pixels
const tip = document.body.appendChild(document.createElement("div"));
tip.id = "tip";
tip.hidden = true;
for (const title of document.querySelectorAll(".mark > title")) {
  // Without the script browsers show titles themselves; with it there would be two.
  title.parentNode.dataset.tip = title.textContent;
  title.parentNode.setAttribute("aria-label", title.textContent);
  title.remove();
}
function nearest(area, x, y) {
  let best = null, least = NEAR * NEAR;
  for (const circle of area.querySelectorAll("circle")) {
    const box = circle.getBoundingClientRect();
    const dx = box.x + box.width / 2 - x, dy = box.y + box.height / 2 - y;
    const square = dx * dx + dy * dy;
    if (square < least) [best, least] = [circle, square];
  }
  return best && { mark: best.closest(".mark"), box: best.getBoundingClientRect() };
}
function clear() {
  for (const mark of document.querySelectorAll(".mark.on")) mark.classList.remove("on");
  tip.hidden = true;
}
function show(event) {
  clear();
  const area = event.target.closest && event.target.closest(".area");
  const hit = area && nearest(area, event.clientX, event.clientY);
  if (!hit) return;
  const key = hit.mark.dataset.key;
  const same = key === undefined ? [hit.mark] : document.querySelectorAll(`[data-key="${key}"]`);
  for (const mark of same) mark.classList.add("on");
  tip.textContent = hit.mark.dataset.tip;
  tip.hidden = false;
  const width = document.documentElement.clientWidth, middle = hit.box.x + hit.box.width / 2;
  const left = Math.min(Math.max(8, middle - tip.offsetWidth / 2), width - tip.offsetWidth - 8);
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${hit.box.y + window.scrollY - tip.offsetHeight - 8}px`;
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
