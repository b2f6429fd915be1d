// Draws the charts. The part that is chosen in an overview is what its chart shows.
"use strict";
const specs = JSON.parse(document.getElementById("charts").textContent);
const options = { actions: false, renderer: "svg" };

async function draw(figure) {
  const spec = specs[figure.dataset.chart];
  const { view } = await vegaEmbed(figure, spec, options);
  if (figure.dataset.overview === undefined) return;
  const small = document.querySelector(`[data-chart="${figure.dataset.overview}"]`);
  const overview = await vegaEmbed(small, specs[small.dataset.chart], options);
  const [first, last] = [view.signal("first"), view.signal("last")];
  overview.view.addSignalListener("part", (_, part) => {
    const [from, to] = Object.values(part)[0] ?? [first, last];
    if (to > from) view.signal("first", from).signal("last", to).runAsync();
  });
}

Promise.all([...document.querySelectorAll(".chart")].map(draw)).then(
  () => { document.documentElement.dataset.drawn = "all"; },
  (error) => { document.documentElement.dataset.drawn = String(error); },
);
const unfolded = [];
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details:not([open])")) { each.open = true; unfolded.push(each); }
});
addEventListener("afterprint", () => { for (const each of unfolded.splice(0)) each.open = false; });
