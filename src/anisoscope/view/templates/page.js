/* The page: selections, legend, verdicts, theme, print, and new data in place. */
(function (page) {
  "use strict";
  const root = document.documentElement, charts = page.charts;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const kept = { html: {}, switches: {}, csv: null, concepts: null };

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), function (c) { return c.charCodeAt(0); });
    return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
  }
  function all(query, within) { return Array.from((within || document).querySelectorAll(query)); }

  /* Figures are drawn when they come near the screen. */
  const observer = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.isIntersecting) { observer.unobserve(entry.target); charts.draw(entry.target.id); }
    });
  }, { rootMargin: "700px 0px" });

  /* Selections and sliders. What was chosen is kept by its words, because new data may add options. */
  function wireSwitch(box) {
    const own = box.dataset.switch, inputs = all("select, input[type=range]", box);
    const says = document.querySelector('[data-says="' + own + '"]'), play = box.querySelector(".play");
    const before = kept.switches[own] || [];
    function words(input) { return input.options ? input.selectedOptions[0].textContent : input.dataset.words.split("|")[Number(input.value)]; }
    inputs.forEach(function (input, i) {
      if (before[i] === undefined) return;
      const labels = input.options ? Array.from(input.options).map(function (o) { return o.textContent; }) : input.dataset.words.split("|");
      if (!input.options && before[i].last) input.value = input.max;
      else if (labels.indexOf(before[i].words) >= 0) input.value = String(labels.indexOf(before[i].words));
    });
    function read() {
      inputs.forEach(function (input, i) {
        const name = own + "." + i;
        charts.chosen[name] = Number(input.value);
        charts.worded[name] = words(input);
        if (!input.options) { input.parentElement.querySelector("output").textContent = charts.worded[name]; input.setAttribute("aria-valuetext", charts.worded[name]); }
      });
      if (says) says.textContent = inputs.map(function (s) { return s.options ? s.selectedOptions[0].dataset.words || "" : ""; }).join(" ");
    }
    read();
    box.hidden = inputs.every(function (s) { return s.options && s.options.length < 2; });
    inputs.forEach(function (input, i) {
      input.addEventListener(input.options ? "change" : "input", function () {
        read();
        kept.switches[own] = inputs.map(function (one) { return { words: words(one), last: !one.options && one.value === one.max }; });
        charts.drawn.forEach(function (id) { if (charts.hangs(id, own + "." + i)) charts.draw(id); });
      });
    });
    const slider = inputs.find(function (input) { return !input.options; });
    let timer = 0;
    function move(value) { slider.value = String(value); slider.dispatchEvent(new Event("input")); }
    function stop() { clearInterval(timer); timer = 0; play.textContent = "▶ Play"; }
    if (play) play.addEventListener("click", function () {
      if (timer) { stop(); return; }
      if (Number(slider.value) >= Number(slider.max)) move(0);
      play.textContent = "❚❚ Pause";
      timer = setInterval(function () {
        if (!slider.isConnected) clearInterval(timer);
        else if (Number(slider.value) >= Number(slider.max)) stop(); else move(Number(slider.value) + 1);
      }, 900);
    });
  }

  /* Swatches of the ramp: the same colours as the lines. */
  function swatches() {
    all("[data-seq]").forEach(function (node) { node.style.setProperty("--c", charts.colour("@seq:" + node.dataset.seq)); });
  }

  /* Models on and off, in all charts at once; a figure of one model goes with it. */
  function show(line, on) {
    if (on) charts.hidden.delete(line); else charts.hidden.add(line);
    all('main [data-line="' + line + '"]:not(button)').forEach(function (node) { node.hidden = !on; });
  }
  const lines = {};
  function wireKey(button) {
    const line = Number(button.dataset.line);
    if (lines[line] === undefined) lines[line] = button.getAttribute("aria-pressed") !== "false";
    button.setAttribute("aria-pressed", String(lines[line]));
    show(line, lines[line]);
    button.addEventListener("click", function () {
      lines[line] = !lines[line];
      show(line, lines[line]);
      all('.key button[data-line="' + line + '"]').forEach(function (twin) { twin.setAttribute("aria-pressed", String(lines[line])); });
      if (lines[line]) all('details.panels [data-line="' + line + '"]').forEach(function (node) { if (!node.closest("details.behind:not(.panels):not([open])")) node.closest("details").open = true; });
      charts.redraw();
    });
  }

  /* Verdicts: a badge opens what is behind it, below its row. */
  function tell(button, open) {
    const target = document.getElementById(button.getAttribute("aria-controls"));
    if (open) all(".verdict-grid button[aria-expanded=true]", button.closest("table")).forEach(function (other) { if (other !== button) tell(other, false); });
    button.setAttribute("aria-expanded", String(open));
    if (open) target.removeAttribute("hidden"); else target.setAttribute("hidden", "until-found");
  }
  function wireBadge(button) {
    const target = document.getElementById(button.getAttribute("aria-controls"));
    button.addEventListener("click", function () { tell(button, button.getAttribute("aria-expanded") !== "true"); });
    target.addEventListener("beforematch", function () { tell(button, true); });
  }

  function wire(within) {
    all("[data-switch]", within).forEach(wireSwitch);
    all(".plot", within).forEach(function (node) { if (!charts.drawn.has(node.id)) observer.observe(node); });
    all(".key button", within).forEach(wireKey);
    all(".verdict-grid button", within).forEach(wireBadge);
    const theme = (within || document).querySelector("#theme");
    if (theme) theme.addEventListener("click", turn);
    if ((within || document).querySelector("#csv") && kept.csv !== null) page.table(kept.csv);
    if ((within || document).querySelector("#cards") && kept.concepts !== null) page.concepts(kept.concepts);
    swatches();
  }

  /* A link leads to what it names, also where that is folded. */
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const inner = target.matches("section.closed") ? target.querySelector("details") : null;
    if (inner) inner.open = true;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView();
  }
  window.addEventListener("hashchange", reveal);
  document.addEventListener("click", function (event) {
    const link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link && link.getAttribute("href") === location.hash) reveal();
  });

  /* Theme */
  function turn() {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("anisoscope-theme", root.dataset.theme); } catch (e) { /* a file may have no storage */ }
    swatches();
    charts.redraw();
  }
  dark.addEventListener("change", function () { swatches(); charts.redraw(); });

  /* Print: everything drawn, on white */
  let before = null;
  window.addEventListener("beforeprint", function () {
    before = root.dataset.theme || "";
    root.dataset.theme = "light";
    all("details").forEach(function (d) { d.open = true; });
    charts.names().forEach(function (id) { /* half a sheet of paper, or most of it; the page's own width is no guide */
      const node = document.getElementById(id);
      charts.draw(id, node && node.closest(".single") ? 460 : 330);
    });
  });
  window.addEventListener("afterprint", function () {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    charts.redraw();
  });

  /* New data: blocks that differ are replaced; what was opened, chosen, found or drawn in them stays. */
  function state(block) {
    const places = {};
    function name(fold) { /* of a fold: its section and its summary, without numbers that grow */
      const owner = fold.closest("section, article, .block"), text = fold.querySelector("summary").textContent.replace(/[\d.,]+/g, "#").trim();
      return owner.id + "|" + text;
    }
    const found = {
      open: new Set(all("details", block).filter(function (d) { return d.open; }).map(name)), name: name,
      told: all("button[aria-expanded=true]", block).map(function (b) { return b.getAttribute("aria-label").replace(/:[^:]*$/, ""); }),
      inputs: all("#by-metric, #by-model, #by-text", block).map(function (input) { return [input.id, input.value]; }),
      focus: block.contains(document.activeElement) && document.activeElement.id, plots: places
    };
    all(".plot", block).forEach(function (node) { if (charts.drawn.has(node.id)) places[node.id] = node; });
    return found;
  }
  function replaced(block, html) {
    const was = state(block), fresh = document.createElement("template");
    fresh.innerHTML = html;
    Object.keys(was.plots).forEach(function (id) { /* a plot is kept: it moves to its new values instead of blinking */
      const place = fresh.content.querySelector('[id="' + id + '"]');
      if (!place) return;
      was.plots[id].setAttribute("aria-label", place.getAttribute("aria-label"));
      place.replaceWith(was.plots[id]);
    });
    block.replaceChildren(fresh.content);
    all("details", block).forEach(function (fold) { if (was.open.has(was.name(fold))) fold.open = true; });
    wire(block);
    all(".verdict-grid button", block).forEach(function (button) {
      if (was.told.includes(button.getAttribute("aria-label").replace(/:[^:]*$/, ""))) tell(button, true);
    });
    was.inputs.forEach(function (pair) {
      const input = document.getElementById(pair[0]);
      if (input && pair[1]) { input.value = pair[1]; input.dispatchEvent(new Event(input.options ? "change" : "input")); }
    });
    if (was.focus && document.getElementById(was.focus)) document.getElementById(was.focus).focus({ preventScroll: true });
  }
  function loaded(data) {
    charts.load(data);
    kept.csv = data.csv === undefined ? null : data.csv;
    kept.concepts = data.concepts === undefined ? null : data.concepts;
  }
  page.update = function (data) {
    const home = document.getElementById("page"), wanted = data.blocks.map(function (block) { return block.id; });
    const seen = all(".block").find(function (block) { return block.getBoundingClientRect().bottom > 0; });
    const top = seen ? seen.getBoundingClientRect().top : 0;
    loaded(data);
    document.title = data.title + " – anisoscope";
    all(".block").forEach(function (block) { if (!wanted.includes(block.id)) block.remove(); });
    let last = null;
    data.blocks.forEach(function (one) {
      let block = document.getElementById(one.id);
      if (!block) {
        block = document.createElement("div");
        block.className = "block";
        block.id = one.id;
        if (last) last.after(block); else home.prepend(block);
      }
      last = block;
      if (kept.html[one.id] !== one.html) { kept.html[one.id] = one.html; replaced(block, one.html); }
    });
    charts.drawn.forEach(function (id) { charts.draw(id); });
    if (seen && seen.isConnected) window.scrollBy(0, seen.getBoundingClientRect().top - top);
  };

  page.ready = unpacked(document.getElementById("data").textContent).then(function (data) {
    loaded(data);
    wire();
    if (location.hash) reveal();
  });
})(window.anisoscope);
