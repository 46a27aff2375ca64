"use strict";
const byId = (id) => document.getElementById(id);

// The state of a job is asked for every three seconds until the job has ended.
async function follow(box) {
  try {
    const answer = await fetch(box.dataset.live);
    if (!answer.ok) {
      box.innerHTML = '<p class="error" role="alert">The server could not show this job; its messages say why.</p>';
      return;
    }
    const state = () => box.querySelector("[data-state]")?.dataset.state, details = () => box.querySelector("details");
    const text = await answer.text(), [before, open] = [state(), details()?.open];
    if (text !== box.lastText) {
      box.innerHTML = box.lastText = text;
      if (details() && state() === before) details().open = open;
    }
    if (box.querySelector("[data-ended]")) return showMaps(box.querySelector("[data-maps]"));
  } catch { /* The server does not answer; it may come back. */ }
  setTimeout(follow, 3000, box);
}

function showMaps(box) {
  if (!box) return;
  let viewer = null, shown = null, timer = null;
  async function draw() {
    const query = `?record=${encodeURIComponent(byId("record").value)}&threshold=${byId("threshold").value}`;
    byId("map").src = `${box.dataset.maps}map${query}`;
    const found = await (await fetch(`${box.dataset.maps}pairs${query}`)).json();
    byId("count").textContent = `${found.count} pairs`;
    if (!byId("viewer") || !found.structure) return;
    if (!window.$3Dmol) await new Promise((done) => {
      document.head.append(Object.assign(document.createElement("script"), { src: "/static/3Dmol-min.js", onload: done }));
    });
    viewer ??= $3Dmol.createViewer("viewer", { backgroundColor: "white" });
    if (shown !== found.structure) {
      const file = await (await fetch(box.dataset.files + found.structure)).text();
      viewer.removeAllModels();
      viewer.addModel(file, /\.(cif|mmcif)$/.test(found.structure) ? "cif" : "pdb");
      viewer.setStyle({}, { cartoon: { color: "lightgrey" } });
      viewer.zoomTo();
      shown = found.structure;
    }
    viewer.removeAllShapes();
    for (const { ends } of found.pairs) {
      if (!ends) continue;
      const apart = Math.hypot(...["x", "y", "z"].map((axis) => ends[0][axis] - ends[1][axis]));
      viewer.addCylinder({ start: ends[0], end: ends[1], radius: 0.15, color: apart <= 12 ? "#0072b2" : "#d55e00" });
    }
    viewer.render();
  }
  const later = () => {
    byId("least").textContent = Number(byId("threshold").value).toFixed(2);
    clearTimeout(timer);
    timer = setTimeout(draw, 150);
  };
  byId("threshold").addEventListener("input", later);
  const usual = () => {
    byId("threshold").value = byId("record").selectedOptions[0].dataset.usual;
    later();
  };
  byId("record").addEventListener("change", usual);
  usual();
}

// A server that refuses a large file would only break the connection, so the browser refuses it.
function check(event) {
  const files = [...event.target.querySelectorAll("input[type=file]")].flatMap((input) => [...input.files]);
  const fits = files.reduce((sum, file) => sum + file.size, 0) < event.target.dataset.limit;
  byId("too-large").hidden = fits;
  if (!fits) event.preventDefault();
}

const live = document.querySelector("[data-live]");
if (live) follow(live);
document.querySelector("form[data-limit]")?.addEventListener("submit", check);
document.querySelector("[data-copy]")?.addEventListener("click", ({ target }) => {
  navigator.clipboard.writeText(byId(target.dataset.copy).textContent);
  target.textContent = "Copied";
});
