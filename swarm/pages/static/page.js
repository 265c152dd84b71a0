"use strict";
// Tips of charts and tokens; and, where the page is served, what changed since: the page is asked for again, and only
// elements that differ are replaced, so that what was opened, scrolled or marked stays so.

const tip = document.getElementById("tip");
document.addEventListener("mousemove", event => {
  const target = event.target.closest("[data-tip]");
  tip.style.opacity = target ? 1 : 0;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
  tip.style.top = (event.clientY + 14) + "px";
});

function renew(shown, fresh) {
  if (shown.isEqualNode(fresh)) return;
  const isSame = shown.nodeType === Node.ELEMENT_NODE && shown.nodeName === fresh.nodeName;
  if (!isSame || shown.childNodes.length !== fresh.childNodes.length) {
    shown.replaceWith(fresh);
    return;
  }
  for (const {name, value} of fresh.attributes)
    if (name !== "open" && shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  for (const name of shown.getAttributeNames())
    if (name !== "open" && !fresh.hasAttribute(name)) shown.removeAttribute(name);
  const pairs = [...shown.childNodes].map((child, index) => [child, fresh.childNodes[index]]);
  for (const [child, other] of pairs) renew(child, other);
}

async function keepUpToDate(everyMs) {
  const told = document.getElementById("told");
  let answeredAt = Date.now();
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, everyMs));
    if (document.hidden) continue;
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      renew(document.querySelector("main"), fresh.querySelector("main"));
      document.title = fresh.title;
      answeredAt = Date.now();
      told.textContent = "";
    } catch {
      told.textContent = `no answer for ${Math.round((Date.now() - answeredAt) / 1000)} s: this is how it stood then`;
    }
  }
}

if (document.body.dataset.everyMs) keepUpToDate(Number(document.body.dataset.everyMs));
