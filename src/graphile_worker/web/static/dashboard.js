// The dashboard works without this script. With it, marked regions of a page stay up to date, keys work, and
// confirmations open in a dialog. A region is an element with an id and data-region: a refresh fetches the page's own
// address again, and replaces the regions that changed.

const body = document.body;
const dialog = document.getElementById("dialog");
const announcer = document.getElementById("announcer");
const connection = document.getElementById("connection");
const connectionText = document.getElementById("connection-text");

const POLL = 5000; // while the event stream is not open
const SAFETY_POLL = 30_000; // while it is: relative times move, and a notification may have been lost
const SHORTEST_PAUSE = 1000; // between two refreshes because of events
const LONGEST_WAIT = 15_000; // for one answer

const announce = (text) => {
  announcer.textContent = text;
};

// Regions ----------------------------------------------------------------------------------------------------------

const regions = () => [...document.querySelectorAll("[data-region]")];
const received = new Map(regions().map((region) => [region.id, region.innerHTML]));

/** Whether the user is doing something in a region that a replacement would disturb. */
function isBusy(region) {
  const active = document.activeElement;
  if (region.contains(active) && active.matches("textarea, select, input:not([type=checkbox])")) return true;
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed && selection.intersectsNode(region));
}

const keyOf = (element) => {
  if (element.id) return `#${CSS.escape(element.id)}`;
  if (element.dataset.key) return `${element.localName}[data-key="${CSS.escape(element.dataset.key)}"]`;
  if (element.name) return `${element.localName}[name="${CSS.escape(element.name)}"][value="${CSS.escape(element.value)}"]`;
  const href = element.getAttribute("href");
  return href ? `${element.localName}[href="${CSS.escape(href)}"]` : null;
};

/** Replace the content of a region, and keep focus, ticks, open details, the current row and scroll positions. */
function replace(region, fresh) {
  const active = region.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const ticked = [...region.querySelectorAll("input[type=checkbox]:checked")].map(keyOf);
  const details = [...region.querySelectorAll("details[data-key]")].map((one) => [keyOf(one), one.open]);
  const here = region.querySelector("tr.here");
  const row = here && keyOf(here);
  const scrolled = [...region.querySelectorAll(".scroll, .tabs, .way, ul")].map((one) => one.scrollLeft);

  region.replaceChildren(...[...fresh.childNodes].map((node) => document.importNode(node, true)));

  for (const key of ticked) {
    const box = key && region.querySelector(key);
    if (box) box.checked = true;
  }
  for (const [key, open] of details) {
    const one = region.querySelector(key);
    if (one) one.open = open;
  }
  if (row) region.querySelector(row)?.classList.add("here");
  region.querySelectorAll(".scroll, .tabs, .way, ul").forEach((one, index) => {
    if (scrolled[index]) one.scrollLeft = scrolled[index];
  });
  if (active) region.querySelector(active)?.focus({ preventScroll: true });
  prepare(region);
}

let isRefreshing = false;
let isWanted = false;
let lastRefresh = performance.now();
let wasLost = connection.dataset.state === "lost";

/** Fetch this page again, and replace the regions that changed. */
async function refresh() {
  if (isRefreshing) {
    isWanted = true;
    return;
  }
  isRefreshing = true;
  isWanted = false;
  try {
    const answer = await fetch(location.href, {
      headers: { Accept: "text/html" },
      signal: AbortSignal.timeout(LONGEST_WAIT),
    });
    if (answer.status === 401 || answer.status === 403) {
      show("lost", "Signed out");
      stop();
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    apply(page, answer.status);
  } catch {
    show("lost", "No answer; trying again");
    if (!wasLost) announce("The dashboard does not answer. Trying again.");
    wasLost = true;
  } finally {
    isRefreshing = false;
    lastRefresh = performance.now();
    schedule();
  }
}

function apply(page, status) {
  const isAway = page.getElementById("connection")?.dataset.state === "lost";
  for (const region of regions()) {
    const fresh = page.getElementById(region.id);
    // While the database is away, only the banner is new: the last known numbers stay.
    if (!fresh || (isAway && region.dataset.region !== "banner")) continue;
    const text = fresh.innerHTML;
    if (received.get(region.id) === text || isBusy(region)) continue;
    received.set(region.id, text);
    replace(region, fresh);
  }
  if (isAway || status >= 500) {
    show("lost", page.getElementById("connection-text")?.textContent || "Not available");
    if (!wasLost) announce("The database is unavailable. The numbers are the last known ones.");
    wasLost = true;
    return;
  }
  if (document.querySelector("[data-outage]")) {
    location.reload(); // there is no region to replace
    return;
  }
  if (wasLost) announce("The dashboard is up to date again.");
  wasLost = false;
  const time = new Date().toLocaleTimeString([], { hour12: false });
  show(stream?.readyState === EventSource.OPEN ? "live" : "idle", mode() === "live" ? `Live · ${time}` : `Updated ${time}`);
}

function show(state, text) {
  connection.dataset.state = state;
  connectionText.textContent = text;
}

// When to refresh --------------------------------------------------------------------------------------------------

let stream = null;
let timer = 0;

const mode = () => body.dataset.refresh;

function pause() {
  if (mode() === "off") return null;
  if (mode() !== "live") return Number(mode()) * 1000;
  return stream?.readyState === EventSource.OPEN ? SAFETY_POLL : POLL;
}

function schedule() {
  clearTimeout(timer);
  if (document.hidden) return;
  let wait = pause();
  if (isWanted && mode() === "live") wait = Math.max(0, lastRefresh + SHORTEST_PAUSE - performance.now());
  if (wait !== null) timer = setTimeout(refresh, wait);
}

function stop() {
  clearTimeout(timer);
  stream?.close();
  stream = null;
}

/** Begin or end live updates: after a change of the picker, and when the tab is hidden or shown. */
function restart() {
  stop();
  if (document.hidden || mode() === "off") return;
  if (mode() === "live") {
    stream = new EventSource(body.dataset.events);
    stream.addEventListener("changed", (event) => {
      if (!concernsThisPage(event.data)) return;
      isWanted = true;
      if (!isRefreshing) schedule();
    });
    stream.addEventListener("open", () => {
      if (!wasLost) show("live", connectionText.textContent.replace(/^Loaded/, "Live ·"));
      schedule();
    });
    stream.addEventListener("error", schedule);
  }
  schedule();
}

function concernsThisPage(data) {
  let names;
  try {
    names = JSON.parse(data);
  } catch {
    return true;
  }
  if (!Array.isArray(names)) return true;
  const wanted = regions().flatMap((region) => (region.dataset.changes || region.dataset.region).split(" "));
  return names.some((name) => wanted.includes(name) || name === "all");
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else {
    restart();
    if (mode() !== "off") refresh();
  }
});

// Theme and refresh picker -----------------------------------------------------------------------------------------

const theme = document.getElementById("theme");
const picker = document.getElementById("refresh");
const preferences = document.getElementById("preferences");

const save = () =>
  fetch(preferences.action, { method: "POST", body: new URLSearchParams(new FormData(preferences)), redirect: "manual" });

function setTheme(name) {
  theme.value = name;
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  save().catch(() => {});
}

theme.addEventListener("change", () => setTheme(theme.value));
picker.addEventListener("change", () => {
  body.dataset.refresh = picker.value;
  save().catch(() => {});
  restart();
  if (picker.value === "off") show("idle", "Not refreshing");
});

function nextTheme() {
  const names = [...theme.options].map((option) => option.value);
  const name = names[(names.indexOf(theme.value) + 1) % names.length];
  setTheme(name);
  announce(`Theme: ${name}`);
}

// Dialogs ----------------------------------------------------------------------------------------------------------

/** Open in a dialog what is a page of its own without this script. */
async function open(address) {
  try {
    const answer = await fetch(address, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(LONGEST_WAIT) });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const content = page.querySelector("[data-dialog-content]");
    if (!content) throw new Error("no content for a dialog");
    fill([document.importNode(content, true)], content.querySelector("h1, h2")?.textContent);
  } catch {
    location.assign(address);
  }
}

function fill(nodes, label) {
  dialog.replaceChildren(...nodes);
  dialog.setAttribute("aria-label", label || "Dialog");
  prepare(dialog);
  if (!dialog.open) dialog.showModal();
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  const button = event.submitter;
  if (!form.matches("[data-dialog]")) return;
  event.preventDefault();
  // Not form.action, which is a button of that name.
  const address = new URL(form.getAttribute("action"), location.href);
  address.search = new URLSearchParams(new FormData(form, button)).toString();
  open(address.href);
});

document.addEventListener("click", (event) => {
  const target = event.target.closest("a, button");
  if (!target || event.ctrlKey || event.metaKey || event.shiftKey) {
    if (event.target === dialog) dialog.close();
    return;
  }
  if (target.matches("a[data-dialog]")) {
    event.preventDefault();
    open(target.href);
  } else if (dialog.contains(target) && target.matches("[data-close]")) {
    event.preventDefault();
    dialog.close();
  } else if (target.matches("[data-copy]")) {
    copy(target);
  }
});

async function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
    button.textContent = "Copied";
  } catch {
    announce("The browser did not allow to copy");
  }
}

// Selected rows ----------------------------------------------------------------------------------------------------

const boxes = () => [...document.querySelectorAll('table input[name="id"]')];

function countSelected(say = true) {
  const count = document.querySelector("[data-selected]");
  if (!count) return;
  const selected = boxes().filter((box) => box.checked).length;
  const everything = document.querySelector('input[name="all"]')?.checked;
  const text = everything ? "All matching selected" : `${selected} selected`;
  if (say && count.textContent !== text) announce(text);
  count.textContent = text;
  const all = document.querySelector("[data-select-page]");
  if (all) {
    all.checked = selected > 0 && selected === boxes().length;
    all.indeterminate = selected > 0 && selected < boxes().length;
  }
  for (const button of document.querySelectorAll("[data-needs-selection]")) button.disabled = !selected && !everything;
}

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-select-page]")) for (const box of boxes()) box.checked = event.target.checked;
  if (event.target.matches("input[type=checkbox]")) countSelected();
});

/** Show what only works with this script, in new content. */
function prepare(part) {
  for (const element of part.querySelectorAll("[data-script]")) element.hidden = false;
  countSelected(false);
}

// Keys -------------------------------------------------------------------------------------------------------------

const rows = () => [...document.querySelectorAll("tr[data-href]")];

function move(by) {
  const all = rows();
  if (!all.length) return;
  const old = all.findIndex((row) => row.classList.contains("here"));
  const next = all[Math.min(Math.max(old + by, 0), all.length - 1)];
  all[old]?.classList.remove("here");
  next.classList.add("here");
  next.scrollIntoView({ block: "nearest" });
  next.querySelector("a")?.focus({ preventScroll: true });
}

const here = () => document.querySelector("tr.here");

const KEYS = {
  "/": () => document.getElementById("search").focus(),
  r: () => refresh().then(() => wasLost || announce("Updated")),
  t: nextTheme,
  "?": () => fill([document.getElementById("keys-help").content.cloneNode(true)], "Keys"),
  j: () => move(1),
  k: () => move(-1),
  x: () => here()?.querySelector('input[name="id"]')?.click(),
  Enter: () => here() && location.assign(here().dataset.href),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || dialog.open) return;
  if (event.key === "Escape" && document.activeElement?.id === "search") document.activeElement.blur();
  if (event.target.matches?.("input:not([type=checkbox]), textarea, select")) return;
  // Enter on a link or button does what the browser does.
  if (event.key === "Enter" && event.target.matches?.("a, button, summary, input")) return;
  const act = Object.hasOwn(KEYS, event.key) && KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

prepare(document);
restart();
