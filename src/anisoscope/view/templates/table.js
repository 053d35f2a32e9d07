/* The table of results and the cards of concepts. */
(function (page) {
  "use strict";
  page.table = function (text) {
    /* The table is read from what the download holds, so the two cannot differ. */
    const link = document.getElementById("csv");
    if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    function parse(source) {
      const rows = [];
      let row = [], cell = "", quoted = false;
      for (let i = 0; i < source.length; i++) {
        const c = source[i];
        if (quoted) {
          if (c !== '"') cell += c;
          else if (source[i + 1] === '"') { cell += c; i++; }
          else quoted = false;
        } else if (c === '"') quoted = true;
        else if (c === ",") { row.push(cell); cell = ""; }
        else if (c === "\n") { row.push(cell); rows.push(row); row = []; cell = ""; }
        else cell += c;
      }
      return rows;
    }
    const rows = parse(text), names = rows.shift();
    const numeric = new Set(["step", "layer", "value", "low", "high", "sd", "n", "contexts", "dropped", "seed"]);
    const always = new Set(["layer", "kind", "metric", "value", "low", "high"]);
    const shown = names.map(function (_, i) { return i; }).filter(function (i) {
      const seen = new Set(rows.map(function (r) { return r[i]; }));
      return always.has(names[i]) || seen.size > 1;
    });
    const same = names.filter(function (name, i) { return !shown.includes(i) && rows.length && rows[0][i] !== ""; });
    document.getElementById("same").textContent = same.length ? " The same in every row: " + same.map(function (name) {
      return name + " " + readable(rows[0][names.indexOf(name)], name);
    }).join(", ") + "." : "";
    const body = document.querySelector("#rows tbody"), head = document.querySelector("#rows thead");
    const state = { by: -1, down: false, all: false };
    function column(name) { return names.indexOf(name); }
    function readable(value, name) {
      if (!numeric.has(name) || value === "") return value || (name === "value" ? "–" : "");
      const x = Number(value);
      if (Number.isInteger(x)) return x.toLocaleString("en");
      const size = Math.abs(x);
      const shown = size >= 1e7 || size < 1e-4 ? x.toExponential(3) : size >= 1e4 ? Math.round(x).toLocaleString("en") : x.toPrecision(4);
      return shown.replace(/-/g, "−");
    }
    function wanted() {
      const metric = document.getElementById("by-metric").value, model = document.getElementById("by-model").value;
      const words = document.getElementById("by-text").value.toLowerCase().split(/\s+/).filter(Boolean);
      return rows.filter(function (r) {
        if (metric && r[column("metric")] !== metric) return false;
        if (model && r[column("model")] !== model) return false;
        const all = words.length ? r.join(" ").toLowerCase() : "";
        return words.every(function (w) { return all.includes(w); });
      });
    }
    function order(list) {
      if (state.by < 0) return list;
      const i = state.by, sign = state.down ? -1 : 1, byNumber = numeric.has(names[i]);
      return list.slice().sort(function (a, b) {
        if (a[i] === "" || b[i] === "") return (a[i] === "") - (b[i] === "");
        return sign * (byNumber ? Number(a[i]) - Number(b[i]) : a[i].localeCompare(b[i]));
      });
    }
    function fill() {
      const list = order(wanted()), most = state.all ? list.length : 40;
      body.textContent = "";
      list.slice(0, most).forEach(function (r) {
        const line = document.createElement("tr");
        shown.forEach(function (i) {
          const cell = document.createElement("td");
          cell.textContent = readable(r[i], names[i]);
          cell.className = numeric.has(names[i]) ? "num" : names[i] === "note" ? "prose" : "";
          line.appendChild(cell);
        });
        body.appendChild(line);
      });
      document.getElementById("count").textContent =
        "Showing " + Math.min(most, list.length).toLocaleString("en") + " of " + list.length.toLocaleString("en") + " rows.";
      document.getElementById("all").hidden = list.length <= most;
    }
    function headings() {
      const line = document.createElement("tr");
      shown.forEach(function (i) {
        const cell = document.createElement("th"), button = document.createElement("button");
        cell.scope = "col";
        cell.className = numeric.has(names[i]) ? "num" : "";
        button.type = "button";
        button.textContent = names[i];
        button.addEventListener("click", function () {
          state.down = state.by === i ? !state.down : false;
          state.by = i;
          head.querySelectorAll("th").forEach(function (th) { th.removeAttribute("aria-sort"); });
          cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
          fill();
        });
        cell.appendChild(button);
        line.appendChild(cell);
      });
      head.appendChild(line);
    }
    function choices(id, name) {
      const select = document.getElementById(id);
      const values = Array.from(new Set(rows.map(function (r) { return r[column(name)]; }))).sort();
      values.forEach(function (v) { select.appendChild(new Option(v, v)); });
      select.addEventListener("change", fill);
      if (values.length < 2) select.parentElement.hidden = true;
    }
    headings();
    choices("by-metric", "metric");
    choices("by-model", "model");
    document.getElementById("by-text").addEventListener("input", fill);
    document.getElementById("all").addEventListener("click", function () { state.all = true; fill(); });
    document.getElementById("table-filters").hidden = false;
    fill();
  };

  page.concepts = function (models) {
    /* Concept cards: every name becomes text, never markup. */
    const cards = document.getElementById("cards");
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
  };
})(window.anisoscope = window.anisoscope || {});
