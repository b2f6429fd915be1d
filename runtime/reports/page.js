// Draws the charts. The part that is chosen in an overview is what its chart shows.
"use strict";
const { charts: specs, searches } = JSON.parse(document.getElementById("data").textContent);
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

// Rows that have all words that were typed. More than so many are not shown.
const MOST = 50;

function search(box) {
  const rows = searches[box.dataset.search].map((row) => [row, row.join(" ").toLowerCase()]);
  const [input, note, table] = ["input", ".note", "table"].map((part) => box.querySelector(part));
  const right = [...table.querySelectorAll("th")].map((name) => name.className);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = words.length ? rows.filter(([, text]) => words.every((word) => text.includes(word))) : [];
    const body = matches.slice(0, MOST).map(([row]) => {
      const line = document.createElement("tr");
      line.append(...row.map((text, place) => Object.assign(document.createElement("td"), { textContent: text, className: right[place] })));
      return line;
    });
    table.tBodies[0].replaceChildren(...body);
    table.hidden = matches.length === 0;
    const more = matches.length > MOST ? `, of which the first ${MOST} are shown` : "";
    note.textContent = words.length ? `${matches.length} of ${rows.length}${more}` : "";
  });
}
document.querySelectorAll(".search").forEach(search);

const unfolded = [];
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details:not([open])")) { each.open = true; unfolded.push(each); }
});
addEventListener("afterprint", () => { for (const each of unfolded.splice(0)) each.open = false; });
