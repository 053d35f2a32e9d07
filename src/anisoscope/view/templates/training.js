(function () {
  "use strict";
  /* Swatches of the ramp: the same colours as the lines. */
  function swatches() {
    const list = getComputedStyle(document.documentElement).getPropertyValue("--seq").split(",");
    document.querySelectorAll("[data-seq]").forEach(function (node) {
      const at = Number(node.dataset.seq) * (list.length - 1), left = Math.min(Math.floor(at), list.length - 2);
      const part = Math.round((at - left) * 100);
      node.style.setProperty("--c", "color-mix(in srgb, " + list[left + 1] + " " + part + "%, " + list[left] + ")");
    });
  }
  swatches();
  document.getElementById("theme").addEventListener("click", swatches);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", swatches);

  /* Concept cards: every name becomes text, never markup. */
  const source = document.getElementById("concept-data");
  if (!source) return;
  const models = JSON.parse(source.textContent), cards = document.getElementById("cards");
  const model = document.getElementById("concept-model"), place = document.getElementById("concept-place"), step = document.getElementById("concept-step");
  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function percent(share) { return share === null ? "–" : (100 * share).toPrecision(share < 0.01 ? 1 : share < 0.1 ? 2 : 3).replace(/\.0+$/, "") + " %"; }
  function fill(select, labels, values, at) {
    select.textContent = "";
    labels.forEach(function (label, i) { select.appendChild(new Option(label, values[i])); });
    select.selectedIndex = at;
    select.parentElement.hidden = labels.length < 2;
  }
  function current() { return models[Number(model.value)]; }
  function origin(from) {
    const line = make("p", "origin");
    if (!from) { line.textContent = "no concept before it"; return line; }
    const label = "concept " + (from[1] + 1) + " at step " + from[0].toLocaleString("en");
    line.append("from ");
    if (current().steps.includes(from[0])) {
      const button = make("button", "", label);
      button.type = "button";
      button.addEventListener("click", function () { step.value = String(from[0]); draw(from[1]); });
      line.append(button);
    } else line.append(label);
    if (from[2] !== null) line.append(", cosine " + from[2].toFixed(2));
    return line;
  }
  function card(concept) {
    const node = make("article", "card"), head = make("header"), tokens = make("ul", "tokens"), examples = make("ul", "examples");
    head.append(make("h4", "", "Concept " + (concept.concept + 1)), make("span", "", percent(concept.share) + " of the energy explained"));
    const most = Math.max.apply(null, concept.tokens.map(function (t) { return t[1] || 0; }).concat(1e-9));
    concept.tokens.forEach(function (token) {
      const item = make("li", "", token[0]);
      item.style.setProperty("--t", String((token[1] || 0) / most));
      item.append(make("small", "", percent(token[1])));
      tokens.append(item);
    });
    concept.examples.forEach(function (example) {
      const item = make("li");
      const before = make("span");
      before.append(make("span", "", example[0]));
      item.append(before, make("mark", "", example[1]), make("span", "", example[2]));
      item.title = example[0] + example[1] + example[2] + (example[3] === null ? "" : " (code " + example[3] + ")");
      examples.append(item);
    });
    node.append(head, origin(concept.from), tokens, examples);
    return node;
  }
  function draw(found) {
    const list = (current().cards[place.value + "|" + step.value] || []).slice();
    list.sort(function (a, b) { return (b.share || 0) - (a.share || 0); });
    cards.textContent = "";
    list.forEach(function (concept) {
      const node = card(concept);
      if (concept.concept === found) node.classList.add("found");
      cards.append(node);
    });
    if (!list.length) cards.append(make("p", "", "No concepts were kept for this layer and step."));
    const wanted = cards.querySelector(".found");
    if (wanted) wanted.scrollIntoView({ block: "nearest" });
  }
  function places() {
    const chosen = current(), kept = chosen.places.indexOf(place.selectedOptions[0] ? place.selectedOptions[0].textContent : "");
    fill(place, chosen.places, chosen.places.map(function (_, i) { return i; }), kept < 0 ? chosen.middle : kept);
    fill(step, chosen.steps.map(function (s) { return s.toLocaleString("en"); }), chosen.steps, chosen.steps.length - 1);
    draw();
  }
  fill(model, models.map(function (m) { return m.label; }), models.map(function (_, i) { return i; }), 0);
  model.addEventListener("change", places);
  [place, step].forEach(function (select) { select.addEventListener("change", function () { draw(); }); });
  document.getElementById("concept-filters").hidden = false;
  places();
})();
