/* Passes for any processor, and for residuals of 8 bytes on every processor. */
#include "loops.h"

namespace topkef {

const Passes *portable_passes() {
  static const Passes passes = float_table("portable");
  return &passes;
}

const Passes *double_passes() {
  static const Passes passes = [] {
    Passes table{};
    fill_common<double>(&table, "portable");
    fill_row<double, double>(&table, FLOAT64);
    return table;
  }();
  return &passes;
}

}  // namespace topkef
