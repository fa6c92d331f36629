// Which plan of a graph is the fastest: timed, since the heuristics' first can be ten times slower,
// and checked, since not every plan that cuDNN offers computes the graph.
#pragma once

#include <string>
#include <vector>

#include "ffi/cudnn_graph.h"

namespace swiglu_jax::cudnn {

struct TuningLimits {
  // Plans to build and time, in the heuristics' order; the rest are passed over unbuilt. A build
  // takes a fraction of a second.
  size_t plans = 24;
  // Bytes of scratch for operands and results, of which no more than half of the free memory is
  // taken. A graph that needs more is timed with fewer rows.
  int64_t memory = int64_t{4} << 30;
};

struct Trial {
  std::string name;
  std::string tag;
  double us = 0;        // median time of one run, or of the single run that ruled it out
  std::string refusal;  // why it was passed over, or empty
};

struct Tuning {
  std::vector<Trial> trials;
  int64_t rows = 0;  // M that was timed
  // Throws Refused, with the reason of each, if every plan was passed over.
  const Trial& fastest() const;
};

// Times the graph's plans on the current context's GPU, in turns, on a stream of its own. Throws
// Refused if cuDNN takes the graph not at all or there is no room for the scratch.
Tuning tune(const GraphSpec& spec, const Device& device, const TuningLimits& limits);

}  // namespace swiglu_jax::cudnn
