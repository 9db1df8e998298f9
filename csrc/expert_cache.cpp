#include "expert_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "dispatch.h"

namespace octavo {
namespace {

constexpr int kReaders = 8;         // a disk needs several reads at once to reach its speed
constexpr double kHalfLife = 128.0;  // steps after which a use counts half

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
    : memory_(memory), slot_nbytes_(slot_nbytes), counts_(counts), slots_(slots, -1), busy_(slots, 0) {
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
  layers_.push_back(std::make_unique<ExpertLayer>(ExpertLayer{this, int64_t(experts_.size()), down}));
  for (const int64_t begin : begins) experts_.push_back({begin, nbytes});
  return layers_.back().get();
}

void ExpertCache::open(int file, std::vector<uint64_t> sums) {
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
  release();
}

void ExpertCache::release() {
  for (Expert& expert : experts_) expert.slot = -1;
  std::fill(slots_.begin(), slots_.end(), -1);
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
    wanted_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (ends_) return;
    const Piece piece = queue_.front();
    queue_.pop_front();
    lock.unlock();
    Expert& expert = experts_[piece.expert];
    std::string error = read(expert, piece.index);
    lock.lock();
    if (!error.empty()) expert.failed = true, error_ = std::move(error);
    if (--expert.pieces_left > 0) continue;
    done_.push_back(piece.expert);
    arrived_.notify_one();
  }
}

// Reads a piece of an expert into its slot; returns why it cannot be read, or nothing.
std::string ExpertCache::read(const Expert& expert, int64_t index) {
  const int64_t from = index * kPiece, nbytes = std::min(kPiece, expert.nbytes - from);
  char* to = memory_ + expert.slot * slot_nbytes_ + from;
  for (int64_t done = 0; done < nbytes;) {
    const ssize_t got = pread(file_, to + done, nbytes - done, expert.begin + from + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::string("cannot be read (") + strerror(errno) + ")";
    if (got == 0) return "has become shorter";
    done += got;
  }
  count(kBytesRead, nbytes);
  if (piece_sum(to, nbytes) != sums_[expert.first_sum + index]) return "has changed";
  return {};
}

void ExpertCache::start_reading(int64_t number, int64_t slot) {
  if (slots_[slot] >= 0) experts_[slots_[slot]].slot = -1;
  slots_[slot] = number;
  busy_[slot] = 1;
  Expert& expert = experts_[number];
  std::lock_guard lock(mutex_);
  expert.slot = slot;
  expert.failed = false;
  expert.pieces_left = (expert.nbytes + kPiece - 1) / kPiece;
  for (int64_t i = 0; i < expert.pieces_left; i++) queue_.push_back({number, i});
}

// Returns a slot whose expert may be given up: an empty one, else that with the lowest score; -1: all
// are busy.
int64_t ExpertCache::find_slot() const {
  int64_t best = -1;
  for (int64_t slot = 0; slot < int64_t(slots_.size()); slot++) {
    if (busy_[slot]) continue;
    if (slots_[slot] < 0) return slot;
    if (best < 0 || experts_[slots_[slot]].score < experts_[slots_[best]].score) best = slot;
  }
  return best;
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
  if (a.up) age();  // ranks that divide the columns compute an expert in two calls
  for (const int64_t i : needed(layer, a)) {
    if (a.up) experts[i].score += weight_;
    if (experts[i].slot < 0) {
      missing.push_back(i);
    } else {
      ready.push_back(i);
      busy_[experts[i].slot] = 1;
    }
  }
  if (a.up) count(kHits, ready.size()), count(kMisses, missing.size());

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
      busy_[experts[i].slot] = 0;
    }
    ready.clear();
    octavo::experts(part);
    part.counts = nullptr;  // all pairs are counted now
  };

  bool computed = false;
  size_t next = 0, reading = 0;
  for (;;) {
    for (int64_t slot; next < missing.size() && (slot = find_slot()) >= 0; next++, reading++)
      start_reading(layer.first + missing[next], slot);
    wanted_.notify_all();
    if (!ready.empty()) {
      compute();
      computed = true;
      continue;
    }
    if (reading == 0) break;
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [this] { return !done_.empty(); });
    for (const int64_t number : done_) {
      reading--;
      Expert& expert = experts_[number];
      if (expert.failed) {
        busy_[expert.slot] = 0;
        slots_[expert.slot] = -1;
        expert.slot = -1;
      }
      (expert.failed ? failed : ready).push_back(number - layer.first);
    }
    done_.clear();
  }
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

}  // namespace octavo
