// Mixtures of experts whose packed weights are in a file, and of which some are in memory.
//
// Weights are read into slots of the cache's own memory, never mapped: a file that shrinks, or a disk
// that fails, is then an error of a read and not a signal. The number of slots bounds the memory.
#pragma once
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
  int64_t first;  // number of its first expert among those of all layers
  int64_t down;   // position of the weight down in an expert; the weight up is first
};

// Numbers that the cache counts, in memory of the caller, who may read them at any time.
enum ExpertCount : int { kHits, kMisses, kBytesRead, kFailures, kExpertCounts };

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

  // Forgets all weights in memory.
  void release();

  // Returns the reason of the last failed read, once; empty: none failed since.
  std::string take_error();

  // Computes the kernel `experts` with the arguments `a`, in parts: first the experts that are in
  // memory, while threads read the others; then those that have arrived. Rows of experts that cannot
  // be read are NaN.
  void run(const ExpertLayer& layer, const ExpertsArgs& a);

 private:
  struct Expert {
    int64_t begin, nbytes, first_sum = 0;
    int64_t slot = -1;
    double score = 0.0;  // uses, of which older ones count less
    int64_t pieces_left = 0;
    bool failed = false;
  };

  struct Piece {
    int64_t expert, index;
  };

  void read_pieces();
  std::string read(const Expert& expert, int64_t index);
  void start_reading(int64_t expert, int64_t slot);
  int64_t find_slot() const;
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
  std::vector<int64_t> slots_;  // expert in each slot, or -1
  std::vector<char> busy_;      // by slot: it is being read or computed
  double weight_ = 1.0;         // of a use now

  std::mutex mutex_;  // of the following, and of experts that are being read
  std::condition_variable wanted_, arrived_;
  std::deque<Piece> queue_;
  std::vector<int64_t> done_;
  std::string error_;
  bool ends_ = false;
  std::vector<std::thread> readers_;
};

// As ExpertsArgs, but `up` and `down` only say which products are computed.
struct CachedExpertsArgs : ExpertsArgs {
  ExpertLayer* layer;
};

void cached_experts(const CachedExpertsArgs& a);

}  // namespace octavo
