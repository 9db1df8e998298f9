#include "expert_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numbers>
#include <stdexcept>
#include <utility>

#include "dispatch.h"

namespace octavo {
namespace {

constexpr int kReaders = 8;         // a disk needs several reads at once to reach its speed
constexpr double kHalfLife = 128.0;  // steps after which a use counts half
// Uses that a guess is worth: the score of an expert that every second step uses.
constexpr double kGuess = kHalfLife / (2 * std::numbers::ln2);
constexpr double kLeastTrust = 0.75;  // share of right guesses from which experts are fetched ahead
constexpr double kGuesses = 64.0;     // number of guesses over which that share is averaged

// _sum in weight_cache.py
uint64_t piece_sum(const char* data, int64_t nbytes) {
  uint64_t sum = 0, rest = 0;
  const int64_t words = nbytes / 8;
  for (int64_t i = 0; i < words; i++) {
    uint64_t word;
    memcpy(&word, data + i * 8, 8);
    sum += word * uint64_t(2 * i + 1);
  }
  memcpy(&rest, data + words * 8, nbytes - words * 8);
  return sum + rest;
}

// Sets `count` numbers to NaN.
void put_nan(void* to, int64_t count, DType dtype) {
  if (dtype == DType::f32) return (void)std::fill_n(static_cast<float*>(to), count, std::nanf(""));
  std::fill_n(static_cast<uint16_t*>(to), count, uint16_t(dtype == DType::bf16 ? 0x7FC0 : 0x7E00));
}

}  // namespace

ExpertCache::ExpertCache(char* memory, int64_t slot_nbytes, int64_t slots, int64_t* counts)
    : memory_(memory), slot_nbytes_(slot_nbytes), counts_(counts), slots_(slots) {
  for (int i = 0; i < kReaders; i++) readers_.emplace_back([this] { read_pieces(); });
}

ExpertCache::~ExpertCache() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wanted_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  if (file_ >= 0) close(file_);
}

ExpertLayer* ExpertCache::add_layer(const std::vector<int64_t>& begins, int64_t nbytes, int64_t down) {
  layers_.push_back(std::make_unique<ExpertLayer>(
      ExpertLayer{this, int64_t(experts_.size()), int64_t(begins.size()), down}));
  for (const int64_t begin : begins) experts_.push_back({begin, nbytes});
  return layers_.back().get();
}

void ExpertCache::open(int file, std::vector<uint64_t> sums) {
  release();  // no thread reads the old file now
  if (file_ >= 0) close(file_);
  file_ = file;
  sums_ = std::move(sums);
  std::vector<Expert*> own;
  for (Expert& expert : experts_)
    if (expert.begin >= 0) own.push_back(&expert);
  std::sort(own.begin(), own.end(), [](Expert* a, Expert* b) { return a->begin < b->begin; });
  int64_t sum = 0;
  for (Expert* expert : own) {
    expert->first_sum = sum;
    sum += (expert->nbytes + kPiece - 1) / kPiece;
  }
  if (sum != int64_t(sums_.size())) throw std::invalid_argument("one checksum for each piece is needed");
}

void ExpertCache::release() {
  std::unique_lock lock(mutex_);
  for (const Piece& piece : std::exchange(ahead_, {})) slots_[piece.slot].pieces_left--;
  arrived_.wait(lock, [this] {
    return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.pieces_left == 0; });
  });
  done_.clear();
  expected_.clear();
  held_.clear();
  guessed_.clear();
  for (Expert& expert : experts_) expert.slot = -1;
  std::fill(slots_.begin(), slots_.end(), Slot{});
}

std::string ExpertCache::take_error() {
  std::lock_guard lock(mutex_);
  return std::exchange(error_, {});
}

void ExpertCache::count(ExpertCount what, int64_t more) {
  std::atomic_ref(counts_[what]).fetch_add(more, std::memory_order_relaxed);
}

// Body of the threads that read.
void ExpertCache::read_pieces() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [this] { return ends_ || !queue_.empty() || !ahead_.empty(); });
    if (ends_) return;
    std::deque<Piece>& queue = queue_.empty() ? ahead_ : queue_;
    const Piece piece = queue.front();
    queue.pop_front();
    lock.unlock();
    std::string error = read(piece);
    lock.lock();
    Slot& slot = slots_[piece.slot];
    if (!error.empty()) slot.failed = true, error_ = std::move(error);
    if (--slot.pieces_left > 0) continue;
    done_.push_back(piece.slot);
    arrived_.notify_one();
  }
}

// Reads a piece of an expert into its slot; returns why it cannot be read, or nothing.
std::string ExpertCache::read(const Piece& piece) {
  const Expert& expert = experts_[piece.expert];
  const int64_t from = piece.index * kPiece, nbytes = std::min(kPiece, expert.nbytes - from);
  char* to = memory_ + piece.slot * slot_nbytes_ + from;
  for (int64_t done = 0; done < nbytes;) {
    const ssize_t got = pread(file_, to + done, nbytes - done, expert.begin + from + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::string("cannot be read (") + strerror(errno) + ")";
    if (got == 0) return "has become shorter";
    done += got;
  }
  bytes_read_ += nbytes;
  if (piece_sum(to, nbytes) != sums_[expert.first_sum + piece.index]) return "has changed";
  return {};
}

void ExpertCache::start_reading(int64_t number, int64_t index, bool ahead) {
  Slot& slot = slots_[index];
  Expert& expert = experts_[number];
  if (slot.expert >= 0) experts_[slot.expert].slot = -1;
  const int64_t pieces = (expert.nbytes + kPiece - 1) / kPiece;
  {
    std::lock_guard lock(mutex_);
    slot = {number, true, true, ahead, pieces, false};
    for (int64_t i = 0; i < pieces; i++) (ahead ? ahead_ : queue_).push_back({index, number, i});
  }
  expert.slot = index;
  wanted_.notify_all();
}

// Takes note of the slots that have been read, under the mutex. Calls `arrived` with each expert that
// the current call waits for, and with true if it could not be read.
template <class F>
void ExpertCache::note_arrivals(F arrived) {
  for (const int64_t index : std::exchange(done_, {})) {
    Slot& slot = slots_[index];
    slot.reading = false;
    if (slot.expert < 0) continue;  // it was given up meanwhile
    if (!slot.ahead) arrived(slot.expert, slot.failed);
    if (slot.failed) {
      experts_[slot.expert].slot = -1;
      slot = {};
    }
  }
  count(kBytesRead, bytes_read_.exchange(0));
}

// Returns a slot whose expert may be given up: an empty one, else that with the lowest score; -1: all
// are in use.
int64_t ExpertCache::find_slot() const {
  int64_t best = -1;
  for (int64_t i = 0; i < int64_t(slots_.size()); i++) {
    const Slot& slot = slots_[i];
    if (slot.busy || slot.reading) continue;
    if (slot.expert < 0) return i;
    if (best < 0 || experts_[slot.expert].score < experts_[slots_[best].expert].score) best = i;
  }
  return best;
}

void ExpertCache::expect(const ExpectedExpertsArgs& a) {
  expected_.clear();
  std::vector<char> seen(a.layer->count, 0);
  for (int64_t choice = 0; choice < a.top_k; choice++)
    for (int64_t token = 0; token < a.tokens; token++) {
      const int64_t i = a.ids[token * a.top_k + choice], number = a.layer->first + i;
      if (!seen[i] && experts_[number].begin >= 0) expected_.push_back(number);
      seen[i] = 1;
    }
}

// Holds the expected experts that are in memory, and begins to read the others, as far as slots are
// free whose experts are used less than a guess is worth. Those without a free slot stay expected.
// Without trust it only notes which experts it would read.
void ExpertCache::fetch_ahead() {
  if (trust_ < kLeastTrust) {
    for (const int64_t number : std::exchange(expected_, {}))
      if (experts_[number].slot < 0) guessed_.push_back(number);
    return;
  }
  std::erase_if(expected_, [this](int64_t number) {
    const int64_t slot = experts_[number].slot;
    if (slot < 0) return false;
    slots_[slot].busy = true;
    held_.push_back(number);
    return true;
  });
  std::erase_if(expected_, [this](int64_t number) {
    const int64_t slot = find_slot(), old = slot < 0 ? -1 : slots_[slot].expert;
    if (slot < 0) return false;
    if (old >= 0 && experts_[old].score > experts_[number].score + kGuess * weight_) return true;
    start_reading(number, slot, true);
    held_.push_back(number);
    guessed_.push_back(number);
    count(kAhead, 1);
    return true;
  });
}

// Ends the guess, at the beginning of a call that uses the experts `uses` of a layer: it waits for
// those that are still being read, and gives up the others.
void ExpertCache::settle(const ExpertLayer& layer, const std::vector<int64_t>& uses) {
  const auto used = [&](int64_t number) {
    return std::binary_search(uses.begin(), uses.end(), number - layer.first);
  };
  for (const int64_t number : std::exchange(guessed_, {}))
    trust_ += (double(used(number)) - trust_) / kGuesses;
  std::lock_guard lock(mutex_);
  note_arrivals([](int64_t, bool) {});
  for (const Piece& piece : std::exchange(ahead_, {}))
    if (used(piece.expert))
      queue_.push_back(piece);
    else
      slots_[piece.slot].pieces_left--;
  for (const int64_t number : std::exchange(held_, {})) {
    Expert& expert = experts_[number];
    if (expert.slot < 0) continue;  // it could not be read
    Slot& slot = slots_[expert.slot];
    if (slot.ahead && used(number)) count(kAheadUsed, 1);
    slot.busy = slot.ahead = false;
    if (!slot.reading || used(number)) continue;
    slot.reading = slot.pieces_left > 0;
    slot.expert = expert.slot = -1;
  }
}

// Makes all earlier uses count less, by a larger weight of later ones.
void ExpertCache::age() {
  weight_ *= std::exp2(1.0 / (kHalfLife * double(layers_.size())));
  if (weight_ < 1e100) return;
  for (Expert& expert : experts_) expert.score /= weight_;
  weight_ = 1.0;
}

// Returns the experts that a step uses and that this rank has, by their numbers in the layer.
std::vector<int64_t> ExpertCache::needed(const ExpertLayer& layer, const ExpertsArgs& a) const {
  std::vector<char> used(a.experts, 0);
  for (int64_t i = 0; i < a.tokens * a.top_k; i++) used[a.ids[i]] = 1;
  std::vector<int64_t> result;
  for (int64_t i = 0; i < a.experts; i++)
    if (used[i] && experts_[layer.first + i].begin >= 0) result.push_back(i);
  return result;
}

void ExpertCache::run(const ExpertLayer& layer, const ExpertsArgs& a) {
  Expert* const experts = experts_.data() + layer.first;
  std::vector<int64_t> ready, missing, failed;  // by number in the layer
  size_t next = 0, reading = 0;
  const std::vector<int64_t> uses = needed(layer, a);
  if (a.up) {  // ranks that divide the columns compute an expert in two calls
    age();
    settle(layer, uses);
  }
  for (const int64_t i : uses) {
    if (a.up) experts[i].score += weight_;
    if (experts[i].slot < 0) {
      missing.push_back(i);
      continue;
    }
    Slot& slot = slots_[experts[i].slot];
    slot.busy = true;
    if (slot.reading)
      reading++;  // it is being fetched ahead
    else
      ready.push_back(i);
  }
  if (a.up) count(kHits, ready.size()), count(kMisses, missing.size() + reading);

  std::vector<uint64_t> up(a.experts), down(a.experts);
  ExpertsArgs part = a;
  part.up = a.up ? up.data() : nullptr;
  part.down = a.down ? down.data() : nullptr;
  const auto compute = [&] {
    std::fill(up.begin(), up.end(), 0);
    std::fill(down.begin(), down.end(), 0);
    for (const int64_t i : ready) {
      up[i] = reinterpret_cast<uintptr_t>(memory_ + experts[i].slot * slot_nbytes_);
      down[i] = up[i] + layer.down;
      slots_[experts[i].slot].busy = false;
    }
    ready.clear();
    octavo::experts(part);
    part.counts = nullptr;  // all pairs are counted now
  };

  bool computed = false;
  for (;;) {
    for (int64_t slot; next < missing.size() && (slot = find_slot()) >= 0; next++, reading++)
      start_reading(layer.first + missing[next], slot, false);
    if (a.down && next == missing.size()) fetch_ahead();
    if (!ready.empty()) {
      compute();
      computed = true;
      continue;
    }
    if (reading == 0 && next == missing.size()) break;
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [this] { return !done_.empty(); });
    note_arrivals([&](int64_t number, bool is_lost) {
      reading--;
      (is_lost ? failed : ready).push_back(number - layer.first);
    });
  }
  if (a.down) expected_.clear();  // what found no slot
  if (!computed) compute();  // it writes `places`
  if (failed.empty()) return;

  count(kFailures, failed.size());
  const int64_t item = size_of(a.dtype), width = a.gated == Gated::none ? a.up_outputs : a.up_outputs / 2;
  for (int64_t i = 0; i < a.tokens * a.top_k; i++) {
    if (std::find(failed.begin(), failed.end(), a.ids[i]) == failed.end()) continue;
    const int64_t row = a.places[i];
    if (a.down)
      put_nan(static_cast<char*>(a.out) + row * a.out_stride * item, a.down_outputs, a.dtype);
    else
      put_nan(static_cast<char*>(a.inner) + row * a.inner_stride * item, width, a.dtype);
  }
}

void cached_experts(const CachedExpertsArgs& a) {
  if (a.tokens > 0) a.layer->cache->run(*a.layer, a);
}

void expected_experts(const ExpectedExpertsArgs& a) { a.layer->cache->expect(a); }

}  // namespace octavo
