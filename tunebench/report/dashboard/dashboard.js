// Updates the parts of a page that change, and moves through lists by keys. Everything works without this script.
const main = document.getElementById("content");
const interval = Number(main.dataset.live);

function parts(root) {
  return new Map([...root.querySelectorAll("[data-part]")].map(part => [part.dataset.part, part]));
}

// The parts as they came: zoomed charts and opened rows differ from them.
const received = new Map([...parts(document)].map(([name, part]) => [name, part.innerHTML]));
setUpCharts(document);

function swap(name, old, fresh) {
  if (received.get(name) === fresh.innerHTML) return;
  received.set(name, fresh.innerHTML);
  const views = chartViews(old);
  const opened = [...old.querySelectorAll("details")].map(details => details.open);
  const scrolled = [...old.querySelectorAll(".wide")].map(wide => wide.scrollLeft);
  const links = [...old.querySelectorAll("a, input, [tabindex='0']")];
  const focused = links.indexOf(document.activeElement);
  const href = focused >= 0 ? links[focused].getAttribute("href") : null;
  const checked = new Set([...old.querySelectorAll("input:checked")].map(box => box.value));
  const current = old.querySelector("tr.at a")?.getAttribute("href");
  old.replaceChildren(...fresh.childNodes);
  setUpCharts(old, views);
  old.querySelectorAll("details").forEach((details, at) => { details.open = opened[at] ?? false; });
  old.querySelectorAll(".wide").forEach((wide, at) => { wide.scrollLeft = scrolled[at] ?? 0; });
  old.querySelectorAll("input[type=checkbox]").forEach(box => { box.checked = checked.has(box.value); });
  if (current) rows().find(row => row.querySelector("a")?.getAttribute("href") === current)?.classList.add("at");
  if (focused >= 0) {
    const now = [...old.querySelectorAll("a, input, [tabindex='0']")];
    const same = now.find(link => href !== null && link.getAttribute("href") === href) ?? now[focused];
    same?.focus({preventScroll: true});
  }
}

let delay = interval;
async function update() {
  if (!document.hidden && getSelection().isCollapsed) {
    try {
      const answer = await fetch(location.href, {cache: "no-cache"});
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = parts(page);
        for (const [name, part] of parts(document)) if (fresh.has(name)) swap(name, part, fresh.get(name));
        delay = Number(page.getElementById("content").dataset.live) || interval;
        main.removeAttribute("data-lost");
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      main.dataset.lost = "";  // the dashboard was stopped
      delay = 10 * interval;
    }
  }
  setTimeout(update, delay);
}
if (interval) setTimeout(update, interval);

// Filters without a value are left out of the URL.
for (const form of document.forms) form.addEventListener("formdata", event => {
  for (const [name, value] of [...event.formData]) if (!value) event.formData.delete(name);
});

function rows() {
  return [...document.querySelectorAll("table.rows tbody tr")].filter(row => row.querySelector("a"));
}

function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex(row => row.classList.contains("at"));
  const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step))];
  if (at >= 0) all[at].classList.remove("at");
  next.classList.add("at");
  const link = next.querySelector("a");
  link.focus();
  next.scrollIntoView({block: "nearest"});
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const actions = {
    "/": () => document.querySelector("[data-filter]")?.focus(),
    j: () => move(1),
    k: () => move(-1),
    n: () => document.querySelector("a[rel=next]")?.click(),
    x: () => document.querySelector("tr.at input[type=checkbox]")?.click(),
    p: () => document.querySelector("a[rel=prev]")?.click(),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
});
