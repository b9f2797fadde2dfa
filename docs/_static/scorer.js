// How the search of the site ranks pages: pages for users first, records of decisions and the protocol last.
// Sphinx asks score() for each result; its own values follow.
var Scorer = {
  score: ([docName, title, anchor, descr, score]) => {
    if (/^(decisions|internals)\/|^(protocol|architecture)$/.test(docName)) return score / 4;
    if (/^(quickstart|pytorch|stores|checkpoints|compression|frameworks|torch-distributed)$|^(howto|launching|migrating)\//.test(docName)) return score * 2;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
