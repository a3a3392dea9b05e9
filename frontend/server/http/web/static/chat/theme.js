"use strict";
// Runs before the page is drawn, so that a dark page is never shown in light colours first.
(() => {
  let stored = null;
  try { stored = localStorage.getItem("loom-theme"); } catch { /* a browser may refuse */ }
  const asked = new URLSearchParams(location.search).get("theme") || stored;
  document.documentElement.dataset.theme = asked || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
})();
