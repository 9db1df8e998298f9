// The suffix automaton of sequences of tokens: every run of tokens in one of them is a path from
// its start. (A. Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985,
// section 2; several sequences share one.) A token uses about 200 bytes at most.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace octavo {

class SuffixAutomaton {
 public:
  SuffixAutomaton() : slots_(kFirstSlots, kNone), states_(1) {}

  int64_t size() const { return int64_t(history_.size()); }

  int64_t nbytes() const {
    return int64_t(slots_.capacity() * sizeof(slots_[0]) + edges_.capacity() * sizeof(Edge) +
                   states_.capacity() * sizeof(State) + history_.capacity() * sizeof(int32_t));
  }

  // Adds a sequence. No run extends from one sequence into the next.
  void add(const int32_t* tokens, int64_t count) {
    if (size() + count + 1 > kMostTokens) throw std::length_error("too many tokens");
    int32_t last = 0;
    for (int64_t i = 0; i < count; i++) {
      if (tokens[i] < 0) throw std::out_of_range("a token is negative");
      history_.push_back(tokens[i]);
      last = extend(last, tokens[i]);
      // Store the last occurrence of runs; short ones are so frequent that an older place suffices.
      int32_t state = last;
      for (int hops = 0; state > 0 && hops < kUpdatedLinks; hops++, state = states_[state].link)
        states_[state].end = int32_t(history_.size());
    }
    history_.push_back(kSeparator);
  }

  // Finds the longest known run at the end of `tokens` that can be continued. Returns its length
  // and up to `most` tokens that followed it.
  std::pair<int64_t, std::vector<int32_t>> match(const int32_t* tokens, int64_t count,
                                                 int64_t most) const {
    int32_t state = 0;
    int64_t length = 0;
    for (int64_t i = 0; i < count; i++) {
      int32_t next;
      while ((next = find(state, tokens[i])) == kNone && state != 0) {
        state = states_[state].link;
        length = states_[state].length;
      }
      if (next != kNone) state = next, length++;
    }
    for (; state != 0; state = states_[state].link, length = states_[state].length) {
      const int64_t begin = states_[state].end;
      int64_t end = begin;
      while (end < size() && end < begin + most && history_[end] != kSeparator) end++;
      if (end > begin)
        return {length, {history_.begin() + begin, history_.begin() + end}};
    }
    return {0, {}};
  }

 private:
  static constexpr int32_t kNone = -1, kSeparator = -1;
  static constexpr size_t kFirstSlots = 1024;
  static constexpr int kUpdatedLinks = 8;
  static constexpr int64_t kMostTokens = 1 << 24;

  struct State {
    int32_t length = 0;  // of the longest run that leads here
    int32_t link = kNone;  // state of its longest suffix that belongs to another state
    int32_t end = 0;  // in the history, after the run
    int32_t edges = kNone;  // first edge
  };
  struct Edge {
    int32_t from, token, to, next;  // next: next edge of the same state
  };

  std::vector<int32_t> slots_;  // open addressing: indices of edges
  std::vector<Edge> edges_;
  std::vector<State> states_;
  std::vector<int32_t> history_;

  size_t slot(int32_t state, int32_t token) const {
    const uint64_t key = uint64_t(uint32_t(state)) << 32 | uint32_t(token);
    size_t at = size_t((key * 0x9E3779B97F4A7C15u) >> 20) & (slots_.size() - 1);
    while (slots_[at] != kNone && (edges_[slots_[at]].from != state || edges_[slots_[at]].token != token))
      at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  int32_t find(int32_t state, int32_t token) const {
    const int32_t edge = slots_[slot(state, token)];
    return edge == kNone ? kNone : edges_[edge].to;
  }

  void connect(int32_t from, int32_t token, int32_t to) {
    size_t at = slot(from, token);
    if (slots_[at] != kNone) {
      edges_[slots_[at]].to = to;
      return;
    }
    if (edges_.size() * 2 >= slots_.size()) {
      grow();
      at = slot(from, token);
    }
    slots_[at] = int32_t(edges_.size());
    edges_.push_back({from, token, to, states_[from].edges});
    states_[from].edges = slots_[at];
  }

  void grow() {
    slots_.assign(slots_.size() * 2, kNone);
    for (size_t i = 0; i < edges_.size(); i++) slots_[slot(edges_[i].from, edges_[i].token)] = int32_t(i);
  }

  int32_t add_state(int32_t length, int32_t link, int32_t end) {
    states_.push_back({length, link, end, kNone});
    return int32_t(states_.size()) - 1;
  }

  // Returns the state of the run of `last` followed by the token.
  int32_t extend(int32_t last, int32_t token) {
    const int32_t length = states_[last].length + 1, end = int32_t(history_.size());
    const int32_t known = find(last, token);
    if (known != kNone)
      return states_[known].length == length ? known : split(last, token, known, length);
    const int32_t state = add_state(length, 0, end);
    int32_t at = last, next = kNone;
    for (; at != kNone && (next = find(at, token)) == kNone; at = states_[at].link)
      connect(at, token, state);
    if (at != kNone) {
      const int32_t longest = states_[at].length + 1;
      states_[state].link =
          states_[next].length == longest ? next : split(at, token, next, longest);
    }
    return state;
  }

  // Makes a state for the runs of `whole` with at most `length` tokens.
  int32_t split(int32_t at, int32_t token, int32_t whole, int32_t length) {
    const int32_t part = add_state(length, states_[whole].link, states_[whole].end);
    for (int32_t edge = states_[whole].edges; edge != kNone; edge = edges_[edge].next)
      connect(part, edges_[edge].token, edges_[edge].to);
    states_[whole].link = part;
    for (; at != kNone && find(at, token) == whole; at = states_[at].link)
      connect(at, token, part);
    return part;
  }
};

}  // namespace octavo
