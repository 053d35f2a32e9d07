/* A page that a server keeps up to date: asks for new data when the server says that the run has changed. */
(function (page) {
  "use strict";
  const asked = window.location.search, words = document.getElementById("live");
  let shown = document.body.dataset.version || "", busy = false, waiting = false, polling = 0;

  function say(text, state) { if (words) { words.textContent = text; words.dataset.state = state; } }
  function refresh(version) {
    if (version === shown) return;
    if (busy) { waiting = true; return; }
    busy = true;
    fetch("data" + asked, { cache: "no-store" }).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status);
      return answer.json();
    }).then(function (data) {
      shown = data.version;
      return page.ready.then(function () { page.update(data); });
    }).then(function () {
      document.dispatchEvent(new CustomEvent("anisoscope:updated", { detail: shown }));
      say("live", "on");
    }).catch(function () { say("the server does not answer", "off"); }).finally(function () {
      busy = false;
      if (waiting) { waiting = false; look(); }
    });
  }
  function look() {
    fetch("version" + asked, { cache: "no-store" }).then(function (answer) { return answer.json(); })
      .then(function (found) { say("live", "on"); refresh(found.version); })
      .catch(function () { say("the server does not answer", "off"); });
  }
  function poll() { if (!polling) polling = window.setInterval(look, 2000); }
  if (!window.EventSource) { poll(); return; }
  const stream = new EventSource("events" + asked);
  stream.addEventListener("version", function (event) { say("live", "on"); refresh(JSON.parse(event.data)); });
  stream.addEventListener("gone", function () { say("the run is no longer there", "off"); stream.close(); });
  stream.onerror = function () { /* a proxy that holds streams back: ask from time to time instead */
    say("reconnecting", "off");
    if (stream.readyState === EventSource.CLOSED) poll();
  };
})(window.anisoscope);
