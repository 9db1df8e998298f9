// Mixtures of experts whose packed weights are in a file, and of which some are in memory.
//
// Weights are read into slots of the cache's own memory, never mapped: a file that shrinks, or a disk
// that fails, is then an error of a read and not a signal. The number of slots bounds the memory.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

namespace octavo {

class ExpertCache;

// The experts of one layer.
struct ExpertLayer {
  ExpertCache* cache;
  int64_t first, count;  // number of its first expert among those of all layers, and of its experts
  int64_t down;          // position of the weight down in an expert; the weight up is first
};

// A guess which experts a layer will use: those that each token would choose.
struct ExpectedExpertsArgs {
  const int32_t* ids;  // [tokens, top_k]: experts of each token, the most likely first
  int64_t tokens, top_k;
  ExpertLayer* layer;

  void resize(const StepSize& size) { tokens = size.rows; }
  Work work() const { return {double(sizeof(int32_t)) * tokens * top_k, 0.0}; }
};

// Numbers that the cache counts, in memory of the caller, who may read them at any time.
enum ExpertCount : int {
  kHits,      // experts that a step used and found in memory
  kMisses,    // experts that a step used and waited for
  kBytesRead,
  kFailures,  // experts that a step used and that could not be read
  kAhead,     // experts that were fetched ahead
  kAheadUsed,  // of these, those that the next layer used
  kExpertCounts
};

class ExpertCache {
 public:
  static constexpr int64_t kPiece = 2 << 20;  // bytes with a checksum: _CHUNK in weight_cache.py

  // `memory`: [slots * slot_nbytes]. `counts`: [kExpertCounts].
  ExpertCache(char* memory, int64_t slot_nbytes, int64_t slots, int64_t* counts);
  ~ExpertCache();
  ExpertCache(const ExpertCache&) = delete;

  // Adds a layer. `begins`: position of each expert in the file; -1: another rank's.
  ExpertLayer* add_layer(const std::vector<int64_t>& begins, int64_t nbytes, int64_t down);

  // Reads from another file from now on, whose descriptor it owns. `sums`: a checksum of each piece
  // of each expert, in the order of their positions in the file.
  void open(int file, std::vector<uint64_t> sums);

  // Counts in other memory from now on.
  void count_in(int64_t* counts) { counts_ = counts; }

  // Forgets all weights in memory, and waits until no thread reads any.
  void release();

  // Returns the reason of the last failed read, once; empty: none failed since.
  std::string take_error();

  // Computes the kernel `experts` with the arguments `a`, in parts: first the experts that are in
  // memory, while threads read the others; then those that have arrived. Rows of experts that cannot
  // be read are NaN.
  //
  // Then threads fetch the experts ahead that the last call of `expect` named, until the next `run`.
  void run(const ExpertLayer& layer, const ExpertsArgs& a);

  // Has the next `run`, which is of another layer, fetch the missing ones of these experts. The run
  // after that is the guessed one: it gives up all that it does not use. Nothing is fetched while too
  // many guesses are wrong, as wrong ones cost more than right ones save.
  void expect(const ExpectedExpertsArgs& a);

 private:
  struct Expert {
    int64_t begin, nbytes, first_sum = 0;
    int64_t slot = -1;
    double score = 0.0;  // uses, of which older ones count less
  };

  struct Slot {
    int64_t expert = -1;   // that is in it, or is being read; -1: none
    bool busy = false;     // the current call uses it, or the next layer may
    bool reading = false;  // threads read into it, also an expert that was given up meanwhile
    bool ahead = false;    // its expert was fetched ahead, and the guess is not settled
    int64_t pieces_left = 0;  // under the mutex
    bool failed = false;      // under the mutex
  };

  struct Piece {
    int64_t slot, expert, index;
  };

  void read_pieces();
  std::string read(const Piece& piece);
  void start_reading(int64_t expert, int64_t slot, bool ahead);
  template <class F>
  void note_arrivals(F arrived);
  int64_t find_slot() const;
  void fetch_ahead();
  void settle(const ExpertLayer& layer, const std::vector<int64_t>& uses);
  void age();
  std::vector<int64_t> needed(const ExpertLayer& layer, const ExpertsArgs& a) const;
  void count(ExpertCount what, int64_t more);

  char* const memory_;
  const int64_t slot_nbytes_;
  int64_t* counts_;
  int file_ = -1;
  std::vector<uint64_t> sums_;
  std::vector<Expert> experts_;
  std::vector<std::unique_ptr<ExpertLayer>> layers_;
  std::vector<Slot> slots_;
  std::vector<int64_t> expected_;  // experts to fetch ahead, the most likely first
  std::vector<int64_t> held_;      // experts of the guess that have slots
  std::vector<int64_t> guessed_;   // experts of the guess that were missing, fetched or not
  double trust_ = 1.0;             // share of `guessed_` that was used, of which older ones count less
  double weight_ = 1.0;            // of a use now

  std::mutex mutex_;  // of the following, and of slots as noted there
  std::condition_variable wanted_, arrived_;
  std::deque<Piece> queue_, ahead_;  // ahead_: read if queue_ is empty
  std::vector<int64_t> done_;        // slots of which all pieces are read
  std::string error_;
  bool ends_ = false;

  std::atomic<int64_t> bytes_read_ = 0;  // that are not in counts_ yet
  std::vector<std::thread> readers_;
};

// As ExpertsArgs, but `up` and `down` only say which products are computed.
struct CachedExpertsArgs : ExpertsArgs {
  ExpertLayer* layer;
};

void cached_experts(const CachedExpertsArgs& a);
void expected_experts(const ExpectedExpertsArgs& a);

}  // namespace octavo
