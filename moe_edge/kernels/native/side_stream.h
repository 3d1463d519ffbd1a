// Work on a stream of our own beside a program's: begun by one call of the program, waited
// for by a later one. The same code speaks to a GPU's driver and to the host's shim.

#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace moe_edge {

class SideStream : public Driver {
 public:
  using Driver::Driver;

  // The compute stream goes on behind what was begun for `target`.
  std::string Wait(void* compute, const void* target, const void* plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = flights_.find(target);
    if (found == flights_.end()) return "waits for what nothing was started for";
    const Flight flight = found->second;
    flights_.erase(found);
    if (flight.plan != plan) return "the plan has moved while it was carried out";
    const Within within(*this, compute);
    if (within.pushed) Done("cuStreamWaitEvent", calls_.wait(compute, flight.done, 0));
    flight.device->events.push_back(flight.done);  // what waits has read it
    return failed_;
  }

 protected:
  struct Device {
    void *stream, *begun, *kernel;
    std::vector<void*> events;  // that nobody uses
    char* room;  // pinned memory
    size_t room_bytes;
  };

  // What a context needs besides its stream; whether it was got.
  virtual bool Open(Device&) { return true; }

  // Gives our stream some work behind what the compute stream was given so far. `plan`
  // must stand where it is until the wait.
  template <class Work>
  std::string Begin(void* compute, const void* target, const void* plan,
                    const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Within within(*this, compute);
    Device* device = within.pushed ? DeviceOf(within.context) : nullptr;
    void* done = device == nullptr ? nullptr : EventOf(*device);
    if (done == nullptr) return failed_;
    const bool started =
        Done("cuEventRecord", calls_.record(device->begun, compute)) &&
        Done("cuStreamWaitEvent", calls_.wait(device->stream, device->begun, 0)) &&
        work(*device) && Done("cuEventRecord", calls_.record(done, device->stream));
    if (!started) {
      device->events.push_back(done);
      return failed_;
    }
    Forget(flights_.find(target));
    while (flights_.size() >= kMostFlights) {
      Forget(std::min_element(flights_.begin(), flights_.end(), [](auto& a, auto& b) {
        return a.second.number < b.second.number;
      }));
    }
    flights_[target] = {device, done, plan, ++started_};
    return failed_;
  }

 private:
  // More than running programs can have; each waits for its own before long.
  static constexpr size_t kMostFlights = 64;

  struct Flight {
    Device* device;
    void* done;
    const void* plan;
    uint64_t number;  // in the order of their beginning
  };
  using Flights = std::map<const void*, Flight>;  // by what they fill

  // One that nobody has waited for is of a program that failed before it did. Its event
  // may be recorded again: what began since is later on the same stream.
  void Forget(Flights::iterator flight) {
    if (flight == flights_.end()) return;
    flight->second.device->events.push_back(flight->second.done);
    flights_.erase(flight);
  }

  // Null: it failed.
  Device* DeviceOf(void* context) {
    std::unique_ptr<Device>& known = devices_[context];
    if (known != nullptr) return known.get();
    constexpr unsigned non_blocking = 1;
    auto device = std::make_unique<Device>();
    if (Open(*device) &&
        Done("cuStreamCreate", calls_.create_stream(&device->stream, non_blocking)) &&
        (device->begun = EventOf(*device)) != nullptr) {
      known = std::move(device);
    }
    return known.get();
  }

  // One that nobody uses; null: it failed.
  void* EventOf(Device& device) {
    constexpr unsigned no_timing = 2;
    void* event = nullptr;
    if (device.events.empty()) {
      Done("cuEventCreate", calls_.create_event(&event, no_timing));
    } else {
      event = device.events.back();
      device.events.pop_back();
    }
    return event;
  }

  std::map<void*, std::unique_ptr<Device>> devices_;  // by context
  Flights flights_;
  uint64_t started_ = 0;
};

}  // namespace moe_edge
